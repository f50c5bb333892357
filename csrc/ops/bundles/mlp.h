// An MLP whose weights travel as a bundle: hidden slice j lives during the step of shard j only.
#pragma once

#include <vector>

#include "compute/activation.h"
#include "ops/linear.h"

namespace rtp {

// y = down(act(up(x))), or down(act(gate(x)) * up(x)). Gate and up are cut along their output (hidden) features, down
// along its input features, so that shard j of all three meets hidden slice j.
struct MlpShape {
  int64_t in_features = 0;
  int64_t hidden_features = 0;
  int64_t out_features = 0;
  bool gated = false;
  bool transposed = false;  // weights are stored as [in, out]
  bool up_bias = false;     // of the gate too
  bool down_bias = false;
  Activation activation = Activation::gelu;
};

struct MlpResult {
  at::Tensor y;                  // [M, out_features]
  std::vector<at::Tensor> kept;  // hidden values before the activation, [M, hidden_features]: up, gate; or nothing
};

// x [M, in_features] in options.compute_dtype; parameters: local shards of gate weight and bias, up weight and bias,
// down weight and bias, those that exist. `keep`: what backward would otherwise recompute is kept.
MlpResult mlp_forward(Executor& executor, const at::Tensor& x, const std::vector<at::Tensor>& parameters,
                      const MlpShape& shape, bool keep, const RotationOptions& options);

// Returns dx in options.compute_dtype, then the gradients of the parameters (this rank's shards, averaged over the
// ring) in options.reduce_dtype; undefined where not wanted. Hidden values that were not kept are recomputed from the
// shard that is passing by, with no hop more.
std::vector<at::Tensor> mlp_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                     const std::vector<at::Tensor>& kept, const std::vector<at::Tensor>& parameters,
                                     const MlpShape& shape, bool needs_x, const std::vector<bool>& needs_parameter,
                                     const RotationOptions& options);

}  // namespace rtp
