// Sends the first shard of the next pass while the last GEMM of this one runs.
//
// What comes next is learned: the passes of a forward (or backward) are expected in the order of the last one. Only
// facts that are the same on every rank decide whether a hop is sent ahead, so that all ranks send it or none does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

// What the caller says of the passes that follow.
struct Context {
  int64_t phase = 0;      // the passes of one forward or backward of a model share it; 0: unknown
  bool backward = false;  // which of the two
  int64_t serial = 0;     // of the parameters, the same on every rank; 0: unknown
  // Of the parameters, to tell whether they were written. Not the tensors themselves: torch swaps parameters only while
  // nobody else refers to them.
  std::vector<c10::VariableVersion> watched;
};

// A first hop that was sent ahead.
struct Ahead {
  std::shared_ptr<Slot> landing;
  std::shared_ptr<Slot> staged;   // null: it left from the local tensors
  std::vector<at::Tensor> local;  // that it left from, staged or not
  Usage local_usage;
  std::vector<EventHandle> traced;  // what a trace holds of it
};

class Prefetcher {
 public:
  Prefetcher(std::shared_ptr<Transport> transport, SlotPool& pool, Hops& hops, Trace& trace, int rank);

  void enable(bool on) { enabled_ = on; }
  void enter(Context context);

  // Registers the pass that starts now, and returns what was sent ahead for it, if anything. What was sent ahead for
  // another pass, or from parameters that have been written since, is drained.
  std::optional<Ahead> begin(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                             const std::string& name);

  // Whether a hop would be sent ahead now, and sending it.
  bool expects() const;
  void send_ahead();

  // Waits for a hop that was sent ahead and gives its slots back.
  void drain();
  // The same without waiting, for a ring that has failed.
  void forget();

  int64_t sent() const { return sent_; }  // hops sent ahead
  int64_t used() const { return used_; }  // and those that their pass came for

 private:
  // Where a tensor lay, without keeping it alive.
  struct Place {
    explicit Place(const at::Tensor& tensor);
    at::Tensor lock() const;  // undefined where the memory is gone
    bool is(const at::Tensor& tensor) const;

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
  };
  struct Record {
    int64_t serial;
    int index;  // among the passes of one call
    ScheduleOptions options;
    std::string name;
    Step first_hop;  // kNoBuffer: this pass has none that could be sent ahead
    int position;    // of it in the schedule
    int hops;
    std::vector<TensorLayout> layouts;
    std::vector<Place> local;
    std::vector<c10::VariableVersion> watched;

    bool same(const Record& other) const;
  };
  struct History {
    int64_t phase = 0;
    std::vector<Record> last, now;
    bool matches = false;  // this phase has gone like the last one so far
  };
  struct Pending {
    Ahead ahead;
    Record record;
    int64_t phase;
    std::vector<int64_t> versions;
    uint64_t capture;
  };

  Record record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight, const std::string& name);
  History& history() { return histories_[context_.backward ? 1 : 0]; }
  const Record* upcoming() const;
  static std::vector<int64_t> versions(const Record& record);
  bool valid(const Pending& pending, const Record& record) const;

  std::shared_ptr<Transport> transport_;
  SlotPool& pool_;
  Hops& hops_;
  Trace& trace_;
  int rank_;
  bool enabled_ = false;
  bool captured_ = false;  // there are graphs: one may run between two passes, on the slots of a hop under way
  Context context_;
  int index_ = 0;
  std::array<History, 2> histories_;
  std::optional<Pending> pending_;
  int64_t sent_ = 0;
  int64_t used_ = 0;
};

}  // namespace rtp
