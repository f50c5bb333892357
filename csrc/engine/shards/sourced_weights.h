// The shards that passes get from a source, and the first shard of the pass that is expected next.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/hops/history.h"
#include "engine/hops/slots.h"
#include "engine/shards/shard_source.h"

namespace rtp {

// A description of the pulls of one pass.
struct SourcedPass {
  std::vector<size_t> parameters;
  ShardBundle stored;    // layouts as in the memory of the owners; without tensors
  int first = kNoOwner;  // owner of the shard that is pulled first; kNoOwner: none, or the input decides

  bool same(const SourcedPass& other) const { return parameters == other.parameters && first == other.first; }
};

// A shard that is being pulled, or has been.
struct PulledShard {
  int owner;
  std::shared_ptr<Slot> slot;
  std::vector<at::Tensor> places;  // in the slot
  std::shared_ptr<Pull> pull;
};

// All pulls of a ring. They use two slots: while a product reads one, the next shard arrives in the other. The shard
// behind the last one of a pass is the first of the next pass, which is known from the forward before.
class ShardPulls {
 public:
  explicit ShardPulls(SlotPool& pool) : pool_(pool) {}

  void take_from(std::shared_ptr<ShardSource> source);
  ShardSource* source() const { return source_.get(); }
  // Sets the forward of the following passes; 0: unknown, so that nothing is pulled ahead.
  void enter(int64_t phase);
  // Ends a forward: shards that were pulled ahead are dropped, since shards may change now.
  void end_forward();

  // Registers the pass that starts now. Returns the shard that was pulled ahead for it, if any; drops another one.
  std::optional<PulledShard> begin(const SourcedPass& pass);
  PulledShard start(const SourcedPass& pass, int owner);
  // Starts to pull the first shard of the expected next pass, unless that has been done.
  void pull_ahead();
  void drop(PulledShard shard);
  void give_back(PulledShard shard);
  bool has_room() const { return leased_ < kSlots; }
  // Ends a pass.
  void end_pass();

  int64_t started_ahead() const { return started_; }  // shards
  int64_t used_ahead() const { return used_; }        // of these, the shards that their pass used

 private:
  static constexpr int kSlots = 2;

  struct Ahead {
    PulledShard shard;
    SourcedPass pass;
    int64_t phase;
  };

  void drop_ahead();

  SlotPool& pool_;
  std::shared_ptr<ShardSource> source_;
  int64_t phase_ = 0;
  PassHistory<SourcedPass> history_;
  std::optional<Ahead> ahead_;
  int leased_ = 0;
  int64_t started_ = 0, used_ = 0;
};

// The shards that one pass computes with.
class SourcedWeights {
 public:
  // Sets the owners whose shards the pass will ask for; without a call, all.
  void expect(std::vector<bool> owners) { expected_ = std::move(owners); }
  // Returns whether `of` waits for the shard of `step` to be pulled.
  bool waits(const ShardPulls& pulls, const Step& step) const {
    return owner_ != step.owner && !pulls.source()->maps(step.owner);
  }
  // Returns the shard that `step` of the schedule computes with, in the compute dtype or in blocks: where it lies, or
  // in a slot, valid until the next owner. Starts the pulls that come next.
  const std::vector<at::Tensor>& of(ShardPulls& pulls, const Schedule& schedule, const ShardBundle& bundle,
                                    const Step& step);
  void give_back(ShardPulls& pulls);

 private:
  void begin(ShardPulls& pulls, const Schedule& schedule, const ShardBundle& bundle, const Step& step);
  const std::vector<at::Tensor>& arrived(ShardPulls& pulls, int owner);

  std::vector<bool> expected_;  // by owner; empty: all
  bool began_ = false;
  SourcedPass pass_;
  std::deque<int> needed_;             // owners whose shards will be pulled, in order
  std::deque<PulledShard> coming_;     // pulled or being pulled, and not used yet
  std::optional<PulledShard> in_use_;  // empty: the shard in use lies elsewhere
  std::vector<at::Tensor> tensors_;
  int owner_ = kNoOwner;  // of `tensors_`
};

}  // namespace rtp
