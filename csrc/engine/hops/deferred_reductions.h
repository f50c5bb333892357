// Gradients whose last part is still under way when the pass that they are of has ended.
//
// The last hop of a gradient hides under one product of its own layer only. Where that is too short, the hop may go on
// under the next layers' products: the pass leaves its last step, the addition to the local tensors, to this list.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

struct DeferredReduction {
  std::vector<std::shared_ptr<Slot>> slots;  // of the pass: one that it arrives in, and one that it may be leaving
  std::vector<at::Tensor> arriving, local;
  PassHandle traced;
  int position;  // of the step that adds, in the schedule
  Step step;
};

class DeferredReductions {
 public:
  DeferredReductions(std::shared_ptr<Transport> transport, SlotPool& pool, Trace& trace)
      : transport_(std::move(transport)), pool_(pool), trace_(trace) {}

  // How many may be left at the end of a pass. They finish in the order in which they were added.
  void allow(size_t passes) { allowed_ = passes; }
  void add(DeferredReduction reduction) { deferred_.push_back(std::move(reduction)); }
  void end_pass() { finish_all_but(allowed_); }
  void drain() { finish_all_but(0); }
  // Finishes the reduction of `gradient`, and those added before it; does nothing where it has finished.
  void finish(const at::Tensor& gradient);
  // Without waiting, for a ring that has failed.
  void forget() { deferred_.clear(); }

  bool empty() const { return deferred_.empty(); }
  int64_t finished() const { return finished_; }  // ever

 private:
  void finish_all_but(size_t most);
  void finish_next();

  std::shared_ptr<Transport> transport_;
  SlotPool& pool_;
  Trace& trace_;
  std::deque<DeferredReduction> deferred_;
  size_t allowed_ = 0;
  int64_t finished_ = 0;
};

}  // namespace rtp
