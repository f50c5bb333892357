// Cross-entropy passes over one chunk of logits. Raw pointers only.
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

// Logits [rows, columns] of the tokens of a chunk and the vocabulary entries [first_column, first_column + columns).
// Below, z is soft_cap * tanh(logit / soft_cap), or the logit itself if soft_cap is 0.
struct Logits {
  Element type;
  int64_t rows, columns;
  const void* values;
  int64_t stride;          // elements from row to row
  const int64_t* targets;  // [rows], indices into the whole vocabulary
  int64_t first_column;
  int64_t ignore_index;  // tokens with this target are ignored
  float soft_cap;
};

// Updates the running sums of every token; all are [rows] in float32:
//
//   most    maximum of z so far; initialized to a finite value
//   scaled  sum of exp(z - most)
//   hit     z of the target, once its column has been processed
//   total   sum of z; null if not needed
struct LogitSums {
  Logits logits;
  float* most;
  float* scaled;
  float* hit;
  float* total;
};

// gradient = (exp(z - most) * factor - hit_factor * upstream [column is the target] - everywhere * upstream) *
// dz/dlogit. `gradient` [rows, columns] may alias the logits if it has their type and stride. most, factor, upstream:
// [rows], float32; upstream is 0 for ignored tokens.
struct LogitGradient {
  Logits logits;
  Element gradient_type;  // type of the logits, or one with fewer bits
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
