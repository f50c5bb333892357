// Sends the first shard of the next pass while the last GEMM of the current pass runs.
//
// The prefetcher predicts the next pass from history: the passes of a forward (or backward) are expected in the order
// of the previous one. Only facts that are equal on all ranks decide whether a hop is prefetched, so that either all
// ranks send it or none does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hops/history.h"
#include "engine/hops/slots.h"

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
  Prefetcher(std::shared_ptr<Transport> transport, SlotPool& pool, Hops& hops, Trace& trace, int rank);

  void enable(bool on) { enabled_ = on; }
  void enter(Context context);

  // Registers the pass that starts now, and returns the prefetched hop for it, if any. Drains a hop that was prefetched
  // for another pass, or from parameters that have been written since.
  std::optional<PrefetchedHop> begin(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                                     const std::string& name);

  // Returns whether a hop can be prefetched now; prefetch() posts it. `pass`, `position`: of the step that does, in the
  // trace.
  bool expects() const;
  void prefetch(const PassHandle& pass, int position);

  // Waits for the pending prefetched hop and returns its slots.
  void drain();
  // Drops it without waiting, for a failed ring.
  void forget();

  int64_t sent() const { return sent_; }  // prefetched hops
  int64_t used() const { return used_; }  // prefetched hops that their pass used

 private:
  // Storage and geometry of a tensor, without keeping it alive.
  struct WeakTensor {
    explicit WeakTensor(const at::Tensor& tensor);
    at::Tensor lock() const;  // undefined if the memory has been freed
    bool is(const at::Tensor& tensor) const;

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
  };
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
    int64_t phase;
    std::vector<int64_t> versions;
    uint64_t capture;
  };

  Record record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight, const std::string& name);
  PassHistory<Record>& history() { return histories_[context_.backward ? 1 : 0]; }
  const Record* upcoming() const;
  static std::vector<int64_t> versions(const Record& record);
  bool valid(const Pending& pending, const Record& record) const;

  std::shared_ptr<Transport> transport_;
  SlotPool& pool_;
  Hops& hops_;
  Trace& trace_;
  int rank_;
  bool enabled_ = false;
  // the user captures graphs: one may run between two passes and use the slots of a pending hop
  bool captured_ = false;
  Context context_;
  int index_ = 0;
  std::array<PassHistory<Record>, 2> histories_;  // of forwards and of backwards
  std::optional<Pending> pending_;
  int64_t sent_ = 0;
  int64_t used_ = 0;
};

}  // namespace rtp
