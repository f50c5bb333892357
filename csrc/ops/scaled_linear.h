// Linear layers whose products have operands of 8 bits: codes and scales of weight shards visit every rank.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "ops/linear.h"

namespace rtp {

// The planes of the operands that a rank quantizes itself. The planes of weights are those of LinearShape.
struct ScaledOperands {
  CodePlane tokens;                                          // of x, for y
  CodePlane gradients;                                       // of dy, for dx
  std::optional<std::array<CodePlane, 2>> weight_gradients;  // of dy and x, for dW; nothing: 16 bits, or float32
  int64_t rows = 1;  // the products of dW on a GPU sum over a multiple of so many tokens: zeros are added
};

// An operand of dW = dy^T x, which sums over tokens: with zeros below it on a GPU.
at::Tensor padded(const at::Tensor& values, int64_t multiple);

// y = x @ W.T + b of every layer of a bundle, x [M, in_features] in options.compute_dtype. Parameters as in
// linear_forward. Returns y [M, out_features] of each layer, in options.compute_dtype.
std::vector<at::Tensor> scaled_linear_forward(Executor& executor, const at::Tensor& x,
                                              const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                              const ScaledOperands& operands, const RotationOptions& options);

// dys: one per layer, undefined if nothing depends on its output. Returns the gradient of x, then those of the
// parameters, as linear_backward does.
std::vector<at::Tensor> scaled_linear_backward(Executor& executor, const std::vector<at::Tensor>& dys,
                                               const at::Tensor& x, const std::vector<at::Tensor>& parameters,
                                               const LinearBundle& bundle, const ScaledOperands& operands, bool needs_x,
                                               const std::vector<bool>& needs_parameter,
                                               const RotationOptions& options);

}  // namespace rtp
