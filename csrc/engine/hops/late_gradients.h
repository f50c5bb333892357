// [Note: late gradients]
// Gradients that arrive after their pass.
//
// The last hop of a gradient overlaps with only one product of its own layer. If that product is too short, the hop may
// overlap with the products of the next layers: the pass leaves its last step, the addition to the local tensors, to
// this list. Until it is finished nothing may read the local tensors: `finish` precedes the delivery of a gradient to
// its parameter (rtp_ext/ring/autograd/gradient_delivery.py), `drain` the next forward and every other use of the ring.
// The number that may be open is the same on every rank, so that all of them finish the same gradients at the same
// place. That place may lie in a pass on another stream than that of the gradient and of its reader: the addition
// follows earlier ones, the reader's stream follows the addition, and the allocator hears of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

struct LateGradient {
  // slots of the pass: the receiving ones, and some that may still be sent; and the uses of their parts
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<Usage> uses;
  std::vector<std::vector<at::Tensor>> arriving;
  std::vector<at::Tensor> local;
  PassHandle traced;
  int position;  // position in the schedule of the step that adds or copies
  Step step;
};

class LateGradients {
 public:
  LateGradients(std::shared_ptr<Transport> transport, SlotPool& pool, Sink& sink)
      : transport_(std::move(transport)), pool_(pool), sink_(sink) {}

  // Sets the number of gradients that may remain at the end of a pass. They finish in the order in which they were
  // added.
  void allow(size_t passes) { allowed_ = passes; }
  void add(LateGradient gradient) { late_.push_back(std::move(gradient)); }
  void end_pass() { finish_all_but(allowed_); }
  void drain() { finish_all_but(0); }
  // Finishes the gradient of `tensor` and all earlier ones, if it has not finished, and orders the compute stream after
  // it.
  void finish(const at::Tensor& tensor);
  // Drops all gradients without waiting, for a failed ring.
  void forget() { late_.clear(); }

  bool empty() const { return late_.empty(); }
  int64_t finished() const { return finished_; }  // total number

 private:
  void finish_all_but(size_t most);
  void finish_next();

  std::shared_ptr<Transport> transport_;
  SlotPool& pool_;
  Sink& sink_;
  std::deque<LateGradient> late_;
  size_t allowed_ = 0;
  int64_t finished_ = 0;
  StreamEvent finished_last_;  // end of the newest addition, which follows all earlier ones
};

}  // namespace rtp
