// What a cross-entropy needs of one chunk of logits, in one pass over them. Plain pointers.
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

// Logits [rows, columns] of the tokens of a chunk and the vocabulary entries [first_column, first_column + columns).
// z below is soft_cap * tanh(logit / soft_cap), or the logit itself where soft_cap is 0.
struct Logits {
  Element type;
  int64_t rows, columns;
  const void* values;
  int64_t stride;          // elements from row to row
  const int64_t* targets;  // [rows], of the whole vocabulary
  int64_t first_column;
  int64_t ignore_index;  // a target that counts nowhere
  float soft_cap;
};

// Brings the running sums of every token up to date; all are [rows] in float32:
//   most    the largest z so far; finite at the start
//   scaled  sum of exp(z - most)
//   hit     z of the target, once it came by
//   total   sum of z; null: not wanted
struct LogitSums {
  Logits logits;
  float* most;
  float* scaled;
  float* hit;
  float* total;
};

// gradient = (exp(z - most) * factor - hit_factor * upstream [column is the target] - everywhere * upstream) *
// dz/dlogit. `gradient` [rows, columns] may be the logits where it has their type and stride. most, factor, upstream:
// [rows], float32; upstream is 0 for tokens that count nowhere.
struct LogitGradient {
  Logits logits;
  Element gradient_type;  // that of the logits, or a narrower one
  void* gradient;
  int64_t gradient_stride;
  const float* most;
  const float* factor;
  const float* upstream;
  float hit_factor;
  float everywhere;
  int64_t windows;  // set by the launch
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_logit_sums(const LogitSums& sums, void* stream);
int launch_logit_gradient(LogitGradient gradient, void* stream);

}  // namespace rtp
