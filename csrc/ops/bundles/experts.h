// Mixture-of-experts layers whose weights visit every rank while the tokens stay: no all-to-all, no capacity limit, no
// dropped tokens.
#pragma once

#include <optional>
#include <vector>

#include "compute/activation.h"
#include "ops/scaled_linear.h"

namespace rtp {

// The gate of GPT-OSS: (min(max(pre, -limit), limit) + 1) g sigmoid(alpha g) with g = min(gate, limit).
struct ClampedGate {
  double alpha = 0.0;
  double limit = 0.0;
};

// For token t and choice k: y[t] += weights[t, k] down_e(hidden_e(x[t])) with e = index[t, k]. Stacked parameters, all
// cut along the experts, with up_rows = (gated ? 2 : 1) * hidden:
//
//   up [experts, up_rows, features] and down [experts, features, hidden], or transposed: [experts, features, up_rows]
//   and [experts, hidden, features]; optional biases [experts, up_rows] and [experts, features].
//
// The rows of the gate come first or, if interleaved, alternate with those of up. With gate_apart, up has none of them:
// the gate is a parameter of its own, [experts, hidden, features], without biases, and the last one.
struct ExpertsShape {
  int64_t experts = 0;
  int64_t features = 0;
  int64_t hidden_features = 0;
  bool gated = true;
  bool up_bias = false;
  bool down_bias = false;
  bool transposed = false;
  bool interleaved = false;
  bool gate_apart = false;
  Activation activation = Activation::silu;
  std::optional<ClampedGate> clamped;  // replaces the activation
  // The weights are stored in blocks, uint8 [experts, bytes]; an expert fills whole blocks.
  std::optional<BlockFormat> up_frozen, down_frozen;
  std::vector<int64_t> starts;  // of every expert among the sorted choices, and the end, where they are known before
  // The weights travel in 8 bits, and products have operands of 8 bits: each expert is a layer by itself, with codes and
  // scales of its own and of the rows of its tokens. The backward needs kept values.
  std::optional<CodePlanes> codes;
  std::optional<ScaledOperands> scaled;
};

struct ExpertsResult {
  at::Tensor y;                 // [T, features]
  at::Tensor kept;              // up(x) of every routed token, sorted by expert; or undefined
  at::Tensor order;             // [T * K] int64: positions in index.view(-1), sorted by expert
  at::Tensor ends;              // [experts] int64: end of every expert in that order, on the device
  std::vector<int64_t> starts;  // start of every expert in that order, and the end
};

// x [T, features] in options.compute_dtype, weights [T, K] of any floating dtype, index int64 [T, K], contiguous; an
// index equal to `experts` selects no expert. An expert may have any number of tokens, including none. On CUDA, the
// host reads the token counts per expert once, unless the shape has them. parameters: local shards of up, its bias,
// down, its bias and the gate, without the absent ones.
ExpertsResult experts_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weights,
                              const at::Tensor& index, const std::vector<at::Tensor>& parameters,
                              const ExpertsShape& shape, bool keep, const RotationOptions& options);

// Returns the gradients of x (compute dtype), weights (their own dtype) and the parameters (this rank's shards,
// averaged over the ring, in options.reduce_dtype); undefined where `needs`, in the same order, is false.
std::vector<at::Tensor> experts_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                         const at::Tensor& weights, const ExpertsResult& routed,
                                         const std::vector<at::Tensor>& parameters, const ExpertsShape& shape,
                                         const std::vector<bool>& needs, const RotationOptions& options);

}  // namespace rtp
