// Processes the logits of a vocabulary head in chunks.
#pragma once

#include <ATen/core/Tensor.h>

namespace rtp {

// One chunk of logits [rows, columns] and the targets of its tokens. The targets are int64 [rows], contiguous.
struct LogitChunk {
  at::Tensor logits;   // before the soft cap; overwritten
  at::Tensor targets;  // indices into the whole vocabulary
  int64_t first_column = 0;
  int64_t ignore_index = -100;
  double soft_cap = 0;  // z = cap * tanh(logits / cap); 0: z = logits
};

// Running sums for every token of a chunk, all [rows] and contiguous, in the dtype of the logits, or in float32 for
// 16-bit logits.
struct RunningSums {
  at::Tensor most;    // maximum of z so far; initialized to a finite value
  at::Tensor scaled;  // sum of exp(z - most)
  at::Tensor hit;     // z of the target, once its column has been processed
  at::Tensor total;   // sum of z; undefined if not needed
};

void add_logits(const LogitChunk& chunk, const RunningSums& sums);

// d loss / d z = (exp(z - most) factor - (1 - label_smoothing) upstream [z is the target's] - everywhere upstream).
struct LogitTerms {
  at::Tensor most, factor, upstream;  // most: as in RunningSums; upstream: 0 for ignored tokens
  double label_smoothing = 0;
  double everywhere = 0;
};

// Returns the gradient of the logits, [rows, columns], in `dtype` on a GPU and in the dtype of the logits on a CPU. The
// result may share the memory of the logits.
at::Tensor logit_gradient(const LogitChunk& chunk, const LogitTerms& terms, at::ScalarType dtype);

}  // namespace rtp
