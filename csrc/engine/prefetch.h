// Sends the first shard of the next pass, or of the next two, while the last GEMM of the current pass runs.
//
// The prefetcher predicts passes from history: the passes of a forward (or backward) are expected in the order of the
// previous one. With two passes ahead, the first passes of a backward are expected after the last ones of a forward if
// a backward followed the previous forward. Only facts that are equal on all ranks decide whether a hop is prefetched,
// so that either all ranks send it or none does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hops/history.h"
#include "engine/hops/slots.h"
#include "engine/hops/weak_tensor.h"

namespace rtp {

// The caller's description of the following passes.
struct Context {
  int64_t phase = 0;      // shared by the passes of one forward or backward of a model; 0: unknown
  bool backward = false;  // forward or backward
  int64_t serial = 0;     // id of the parameters, the same on every rank; 0: unknown
  // Version counters of the parameters, to detect writes. Holding the tensors themselves would prevent torch from
  // swapping parameters, which requires that no other reference exists.
  std::vector<c10::VariableVersion> watched;
};

// A first hop that was posted before its pass began.
struct PrefetchedHop {
  std::shared_ptr<Slot> landing;
  std::shared_ptr<Slot> staged;   // null: the hop sends from the local tensors
  std::vector<at::Tensor> local;  // the sent tensors, staged or not
  Usage local_usage;
  std::vector<EventHandle> traced;  // trace events of the hop
};

class Prefetcher {
 public:
  Prefetcher(std::shared_ptr<Transport> transport, SlotPool& pool, Hops& hops, Sink& sink, int rank);

  // Sets the number of passes whose first hop may be in flight before they begin. 0: none are prefetched.
  void allow(size_t passes) { allowed_ = passes; }
  void enter(Context context);
  const Context& context() const { return context_; }

  // Registers the pass that starts now, and returns the prefetched hop for it, if any. Drains a hop that was prefetched
  // for another pass, or from parameters that have been written since.
  std::optional<PrefetchedHop> begin(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                                     const std::string& name);

  // Returns whether a hop can be prefetched now; prefetch() posts it. `pass`, `position`: of the step that does, in the
  // trace.
  bool expects() const;
  void prefetch(const PassHandle& pass, int position);

  // Waits for the pending prefetched hops and returns their slots.
  void drain();
  // Drops them without waiting, for a failed ring.
  void forget();

  int64_t sent() const { return sent_; }  // prefetched hops
  int64_t used() const { return used_; }  // prefetched hops that their pass used

 private:
  struct Record {
    int64_t serial;
    int index;  // index among the passes of one call
    ScheduleOptions options;
    std::string name;
    Step first_hop;  // kNoBuffer: the pass has no hop that can be prefetched
    int position;    // position of first_hop in the schedule
    int hops;
    std::vector<TensorLayout> layouts;
    std::vector<WeakTensor> local;
    std::vector<c10::VariableVersion> watched;

    bool same(const Record& other) const;
  };
  struct Pending {
    PrefetchedHop prefetched;
    Record record;
    int64_t phase;                   // of the pass; not known yet if it is one of the next backward
    std::optional<size_t> position;  // in the next backward
    std::vector<int64_t> versions;
    uint64_t capture;
  };

  Record record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight, const std::string& name);
  PassHistory<Record>& history() { return histories_[context_.backward ? 1 : 0]; }
  // The pass whose first hop can be prefetched now, and its position if it is one of the next backward.
  struct Upcoming {
    const Record* record = nullptr;  // null: none
    std::optional<size_t> position;
  };
  Upcoming upcoming() const;
  void finish_front();
  bool valid(const Pending& pending, const Record& record) const;

  std::shared_ptr<Transport> transport_;
  SlotPool& pool_;
  Hops& hops_;
  Sink& sink_;
  int rank_;
  size_t allowed_ = 0;
  // the user captures graphs: one may run between two passes and use the slots of a pending hop
  bool captured_ = false;
  Context context_;
  int index_ = 0;
  std::array<PassHistory<Record>, 2> histories_;  // of forwards and of backwards
  bool turned_ = false;                           // a backward has followed the newest forward
  bool turns_ = false;                            // a backward followed the forward before the newest one
  std::deque<Pending> pending_;                   // of the next passes, in order
  int64_t sent_ = 0;
  int64_t used_ = 0;
};

}  // namespace rtp
