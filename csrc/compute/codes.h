// 8-bit floating-point operands of products: largest magnitudes of blocks, and codes with the scales of their blocks.
// base/codes.h has the rules. Equal inputs give bitwise equal outputs on every processor and GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "base/codes.h"

namespace rtp {

// A block of a matrix: rows x columns numbers, fewer at its lower and right edges. columns: 1, a multiple of 32, or at
// least those of the matrix.
struct CodeBlock {
  int64_t rows, columns;
};

// amax[i, j] = the largest magnitude in block [i, j] of `values`, NaN if there is a NaN.
// `values`: [rows, columns], float32, bfloat16 or float16, with contiguous rows. `amax`: float32, contiguous,
// [ceil(rows / block.rows), ceil(columns / block.columns)].
void block_amax(const at::Tensor& amax, const at::Tensor& values, CodeBlock block);

// Writes the codes of `values` and the scales that `rule` gives for `amax`; without it, for the values' own.
// `codes`: float8_e4m3fn or float8_e5m2, [rows, columns], with contiguous rows or columns: a view t() of [columns,
// rows] takes the transposed matrix. `scales`: of amax's shape with any strides, float32, or float8_e8m0fnu for the
// rules with exponents; or, for these, one dimension of swizzled_bytes of amax's rows and columns, where what lies
// between becomes 0. Blocks of one column and several rows, over which a product sums, are swizzled as the transposed
// matrix.
void quantize_codes(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values,
                    const std::optional<at::Tensor>& amax, CodeBlock block, ScaleRule rule);

}  // namespace rtp
