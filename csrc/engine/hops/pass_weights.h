// The weights of one pass in slots: see WeightMoves.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hops/slots.h"
#include "schedule/look_ahead.h"
#include "transport/sink.h"

namespace rtp {

// What passes of one ring share.
struct RingParts {
  std::shared_ptr<Transport> transport;
  SlotPool& pool;
  Hops& hops;
  Sink& sink;
  int rank;

  Streams& streams() const { return transport->streams(); }
  // Returns the sizes of a pass with these weights, if any travel.
  WeightSizes sizes(const Schedule& schedule, const std::optional<ShardBundle>& weights) const;
};

// Which contents and tensors of one pass another pass of the same weights finds in its slots, by those of the latter.
struct KeptWeights {
  std::vector<int> contents;
  std::vector<size_t> tensors;
};

// The memory of the weights of a pass, and the waits for it. Some of the moves may be made before the pass begins. The
// local tensors are first copied into a slot of their own if their dtype differs from the travel dtype, or if the
// transport cannot send from their memory.
class PassWeights : public WeightMoves {
 public:
  // `sent`: counts the hops before the pass begins.
  PassWeights(const RingParts& ring, const Schedule& schedule, WeightSizes sizes, std::optional<ShardBundle> bundle,
              std::string operation, int64_t& sent);

  // The pass begins, with a schedule of the same moves.
  void begin(const PassHandle& pass, const Schedule& schedule);
  // Takes the contents of an ended pass that has kept them.
  void take(PassWeights& from, const KeptWeights& found);
  // The following moves are made by this step of a pass, in the trace.
  void post_from(const PassHandle& pass, int position) { poster_ = pass, poster_position_ = position; }

  const std::optional<ShardBundle>& bundle() const { return bundle_; }
  Usage& usage(const Access& access);
  std::vector<at::Tensor> views(const Buffer& buffer, int owner, int owners = 1) const;
  int hops() const { return hops_made_; }

  // Orders the compute stream after all uses of the local tensors.
  void wait_for_home() { home_.wait_for_all(ring_.streams()); }
  // Waits for all hops that have been posted, and gives all slots back.
  void drain();

 private:
  struct Content {
    std::shared_ptr<Slot> slot;
    std::vector<Usage> places;  // in the slot of a group: the uses of each shard
  };

  void lease(int content, int64_t bytes) override;
  void release(int content) override;
  void lease_staged(int64_t bytes) override;
  void release_staged() override;
  void move(int position) override;
  void hop(int position, const Step& step);
  void copy(int position, const Step& step);
  EventHandle begin_event(int position, const Step& step);
  std::vector<Usage*> usages(const std::vector<Access>& accesses);
  std::byte* slot_start(const Buffer& buffer) const;  // null for a local tensor that was not staged

  const RingParts& ring_;
  std::optional<ShardBundle> bundle_;
  std::string operation_;
  int64_t& sent_;
  std::vector<Content> contents_;
  std::optional<ShardBundle> brought_;  // the tensors in slots, if another pass has brought them
  std::vector<size_t> picked_;          // of these, by tensor of this pass
  std::shared_ptr<Slot> staged_;        // copy of the local tensors, if a copy travels
  Usage home_;                          // of the local tensors, or their copy
  int hops_made_ = 0;
  int64_t settles_;  // of the pool when it was made: other passes may end while this one runs
  PassHandle begun_;
  bool begins_ = false;
  std::vector<EventHandle> traced_;  // events before the pass begins
  PassHandle poster_;
  int poster_position_ = 0;
};

}  // namespace rtp
