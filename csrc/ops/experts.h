// Experts whose weights visit every rank, while the tokens stay: no all-to-all, no capacity, no dropped token.
#pragma once

#include <vector>

#include "compute/activation.h"
#include "ops/rotation.h"

namespace rtp {

// For token t and choice k: y[t] += weights[t, k] down_e(hidden_e(x[t])) with e = index[t, k]. Stacked parameters:
// up [experts, (gated ? 2 : 1) * hidden, features] with the gate's rows first, down [experts, features, hidden]; both
// cut along the experts.
struct ExpertsShape {
  int64_t experts = 0;
  int64_t features = 0;
  int64_t hidden_features = 0;
  bool gated = true;
  Activation activation = Activation::silu;
};

struct ExpertsResult {
  at::Tensor y;                 // [T, features]
  at::Tensor kept;              // up(x) of every routed token in the order of experts, or undefined
  at::Tensor order;             // [T * K] int64: positions in index.view(-1), by expert
  std::vector<int64_t> starts;  // of every expert in that order, and the end
};

// x [T, features] in options.compute_dtype, weights [T, K] of any floating dtype, index int64 [T, K], contiguous; an
// index equal to `experts` is nobody's. Experts may have no token, or all of them. On CUDA the numbers of tokens per
// expert are read once by the host.
ExpertsResult experts_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weights,
                              const at::Tensor& index, const at::Tensor& up, const at::Tensor& down,
                              const ExpertsShape& shape, bool keep, const RotationOptions& options);

// Returns the gradients of x (compute dtype), weights (their own dtype), up and down (this rank's shards, averaged over
// the ring, in options.reduce_dtype); undefined where not wanted.
std::vector<at::Tensor> experts_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                         const at::Tensor& weights, const ExpertsResult& routed, const at::Tensor& up,
                                         const at::Tensor& down, const ExpertsShape& shape,
                                         const std::vector<bool>& needs, const RotationOptions& options);

}  // namespace rtp
