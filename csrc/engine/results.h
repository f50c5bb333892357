// Memory of the tensors that a pass returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace rtp {

// An operation requests the memory of every returned tensor here, in the same order in every call. By default, this is
// fresh memory. A captured pass must write to memory that outlives the capture, so the caller passes its own tensors
// with give() before every run.
class Results {
 public:
  // Following requests return these tensors, until clear().
  void give(std::vector<at::Tensor> places);
  // Following requests return fresh memory and are recorded until clear(), so that the caller can query what an
  // operation returns.
  void note();
  void clear();
  // The tensors requested since give() or note().
  const std::vector<at::Tensor>& requested() const { return requested_; }

  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Returns `made` converted to `dtype`, or a copy in given or recorded memory.
  at::Tensor of(const at::Tensor& made, at::ScalarType dtype);

 private:
  std::optional<std::vector<at::Tensor>> given_;
  bool noting_ = false;
  std::vector<at::Tensor> requested_;
};

}  // namespace rtp
