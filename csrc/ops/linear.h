// Linear layers whose weight and bias shards visit every rank.
#pragma once

#include <optional>
#include <tuple>

#include "ops/common.h"

namespace rtp {

// The layer y = x @ W.T + b with W [out_features, in_features], cut along `shard_dim` of W; b is cut along its only
// dimension in both cases.
struct LinearShape {
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t shard_dim = 0;
};

// x [M, in_features] in options.compute_dtype; weight and bias are home shards of any floating dtype.
// Returns y [M, out_features] in options.compute_dtype.
at::Tensor linear_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const LinearShape& shape,
                          const RotationOptions& options);

// Which gradients of a linear layer are wanted.
struct LinearNeeds {
  bool x = true;
  bool weight = true;
  bool bias = false;
};

// dy [M, out_features] and x in options.compute_dtype. Returns dx in options.compute_dtype and this rank's shards of
// the weight and bias gradients, averaged over the ring, in options.reduce_dtype; undefined where not wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(Executor& executor, const at::Tensor& dy,
                                                               const at::Tensor& x, const at::Tensor& weight,
                                                               const LinearShape& shape, const LinearNeeds& needs,
                                                               const RotationOptions& options);

}  // namespace rtp
