// Where the tensors that a pass returns lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace rtp {

// An operation asks here for the memory of every tensor that it returns, in the same order in every call. Usually that
// is fresh memory. A pass that is captured writes where the graph's next launch will, so its results are given: memory
// that the caller has asked torch for, and which belongs to whoever gets it, as that of any other result.
class Results {
 public:
  // The next results lie where these do; in fresh memory again after clear().
  void give(std::vector<at::Tensor> places);
  // Fresh ones are kept until clear(), so that the caller learns what an operation returns.
  void note();
  void clear();
  // What was asked for since give() or note().
  const std::vector<at::Tensor>& requested() const { return requested_; }

  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
  // What an operation has made, in this dtype: itself, or where results are given or noted, a copy of it in one.
  at::Tensor of(const at::Tensor& made, at::ScalarType dtype);

 private:
  std::optional<std::vector<at::Tensor>> given_;
  bool noting_ = false;
  std::vector<at::Tensor> requested_;
};

}  // namespace rtp
