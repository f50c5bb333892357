// The passes over the logits of a vocabulary head, chunk by chunk.
#pragma once

#include <ATen/core/Tensor.h>

namespace rtp {

// Which logits a chunk [rows, columns] holds, and what they count. The targets are int64 [rows], contiguous.
struct LogitChunk {
  at::Tensor logits;   // before the soft cap; overwritten
  at::Tensor targets;  // of the whole vocabulary
  int64_t first_column = 0;
  int64_t ignore_index = -100;
  double soft_cap = 0;  // z = cap * tanh(logits / cap); 0: z = logits
};

// What is summed for every token of a chunk, all [rows] and contiguous, in the dtype of the logits; in float32 where
// those have 16 bits.
struct RunningSums {
  at::Tensor most;    // the largest z so far; finite at the start
  at::Tensor scaled;  // sum of exp(z - most)
  at::Tensor hit;     // z of the target, once it came by
  at::Tensor total;   // sum of z; undefined: not wanted
};

void add_logits(const LogitChunk& chunk, const RunningSums& sums);

// d loss / d z = (exp(z - most) factor - (1 - label_smoothing) upstream [z is the target's] - everywhere upstream).
struct LogitTerms {
  at::Tensor most, factor, upstream;  // as RunningSums; upstream is 0 where a token does not count
  double label_smoothing = 0;
  double everywhere = 0;
};

// The gradient of the logits, [rows, columns]: in `dtype` on a GPU, in the dtype of the logits on a CPU. It may take
// the memory of the logits.
at::Tensor logit_gradient(const LogitChunk& chunk, const LogitTerms& terms, at::ScalarType dtype);

}  // namespace rtp
