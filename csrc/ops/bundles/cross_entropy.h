// A fused vocabulary head and cross-entropy: vocabulary shards travel, and the logits are computed in chunks.
#pragma once

#include <optional>
#include <vector>

#include "ops/linear.h"

namespace rtp {

// loss[t] = lse - (1 - eps) z[target] - eps / V sum(z) + z_loss lse^2, with z the logits of token t, lse their
// log-sum-exp, eps the label smoothing and V the vocabulary.
struct CrossEntropyShape {
  int64_t vocabulary = 0;
  int64_t features = 0;
  bool transposed = false;  // the weight is stored as [features, vocabulary]
  bool bias = false;
  int64_t ignore_index = -100;  // tokens with this target have a loss of zero
  double label_smoothing = 0;
  double soft_cap = 0;  // logits are cap * tanh(logits / cap); 0: not capped
  double z_loss = 0;
  // The weight is stored in blocks, as in LinearShape; with a bias, a row fills whole blocks.
  std::optional<BlockFormat> frozen = std::nullopt;
};

struct CrossEntropyResult {
  at::Tensor loss;  // [M], in the accumulation dtype
  at::Tensor lse;   // [2, M]: the maximum logit, and the log-sum-exp relative to it; saved for backward
};

// x [M, features] in options.compute_dtype, targets int64 [M], contiguous; parameters: local shards of the weight
// [vocabulary, features], cut along the vocabulary, and of the bias if there is one.
CrossEntropyResult cross_entropy_forward(Executor& executor, const at::Tensor& x, const at::Tensor& targets,
                                         const std::vector<at::Tensor>& parameters, const CrossEntropyShape& shape,
                                         const RotationOptions& options);

// dloss [M] in the accumulation dtype. Returns dx in options.compute_dtype, then this rank's shards of the gradients,
// averaged over the ring, in options.reduce_dtype; undefined if not needed. Logits are recomputed.
std::vector<at::Tensor> cross_entropy_backward(Executor& executor, const at::Tensor& dloss, const at::Tensor& x,
                                               const at::Tensor& targets, const at::Tensor& lse,
                                               const std::vector<at::Tensor>& parameters,
                                               const CrossEntropyShape& shape, bool needs_x,
                                               const std::vector<bool>& needs_parameter,
                                               const RotationOptions& options);

}  // namespace rtp
