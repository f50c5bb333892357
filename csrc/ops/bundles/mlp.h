// An MLP whose weights travel as a bundle: hidden slice j exists only during the step of shard j.
#pragma once

#include <tuple>
#include <vector>

#include "compute/activation.h"
#include "ops/linear.h"

namespace rtp {

// y = down(act(up(x))), or down(act(gate(x)) * up(x)). Gate and up are cut along their output (hidden) features, down
// along its input features, so that shard j of all three operates on hidden slice j.
struct MlpShape {
  int64_t in_features = 0;
  int64_t hidden_features = 0;
  int64_t out_features = 0;
  bool gated = false;
  bool transposed = false;  // weights are stored as [in, out]
  bool up_bias = false;     // applies to the gate, too
  bool down_bias = false;
  Activation activation = Activation::gelu;
  // All weights are stored in blocks, [out, in], and cut along the hidden features between multiples of the block, of
  // which these are one: gate and up uint8 [hidden / block, bytes], down uint8 [out, hidden / block, bytes].
  std::optional<BlockFormat> frozen = std::nullopt;
};

// What a forward keeps for its backward, or nothing: hidden values before the activation, [M, hidden_features], or with
// a gate [M, 2 * hidden_features], where those of the gate and of up alternate by products.
using KeptValues = std::vector<at::Tensor>;

// x [M, in_features] in options.compute_dtype; parameters: local shards of gate weight and bias, up weight and bias,
// down weight and bias, without the absent ones. `keep`: keeps the values that backward would otherwise recompute.
// Returns y [M, out_features], these values, and the number of shards in a product, which decides their order.
std::tuple<at::Tensor, KeptValues, int> mlp_forward(Executor& executor, const at::Tensor& x,
                                                    const std::vector<at::Tensor>& parameters, const MlpShape& shape,
                                                    bool keep, const RotationOptions& options);

// Returns dx in options.compute_dtype, then the gradients of the parameters (this rank's shards, averaged over the
// ring) in options.reduce_dtype; undefined if not needed. `kept`, `group`: of the forward. Hidden values that were not
// kept are recomputed from the current shard, without additional hops.
std::vector<at::Tensor> mlp_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                     const KeptValues& kept, int group, const std::vector<at::Tensor>& parameters,
                                     const MlpShape& shape, bool needs_x, const std::vector<bool>& needs_parameter,
                                     const RotationOptions& options);

}  // namespace rtp
