// Products of matrices in 8 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "base/code_planes.h"

namespace rtp {

// A matrix in 8 bits: each code times the scale of its block.
struct Codes {
  at::Tensor codes;   // [rows, columns], float8_e4m3fn or float8_e5m2
  at::Tensor scales;  // [blocks down, blocks across], float32 or float8_e8m0fnu; or one dimension of swizzled exponents
  Extents block;      // rows and columns

  Codes t() const { return {codes.t(), scales.dim() == 2 ? scales.t() : scales, {block[1], block[0]}}; }
  // Columns of a matrix whose scales are not swizzled, between blocks.
  Codes columns(int64_t first, int64_t count) const;
  at::Tensor dequantized() const;  // float32; not of swizzled exponents
};

// Returns matrices one below the other as one, each with its scales, one for each row where they do not vary along
// columns and the product is not `summed` over rows. None may be swizzled; other blocks have equal sizes, which divide
// the rows.
Codes joined(const std::vector<Codes>& parts, bool summed = false);
// Returns matrices side by side as one. Their blocks have equal sizes, which divide the columns.
Codes joined_columns(const std::vector<Codes>& parts);

// Memory for codes and scales, uint8 and uint8 or float32, of plane.code_memory and plane.scale_memory; with a
// dimension before them of a stack of matrices.
struct CodeMemory {
  at::Tensor codes, scales;

  CodeMemory of(int64_t matrix) const { return {codes.select(0, matrix), scales.select(0, matrix)}; }
};
at::ScalarType scale_dtype(const CodePlane& plane);
CodeMemory empty_codes(const CodePlane& plane, int64_t rows, int64_t columns, at::Device device,
                       std::optional<int64_t> stacked = std::nullopt);

// Returns the matrix [rows, columns] that lies in memory.
Codes codes_in(const CodePlane& plane, const CodeMemory& memory, int64_t rows, int64_t columns);

// Quantizes a matrix, in place with contiguous rows, or `inputs_first` with contiguous columns. See quantize_codes,
// also for `amax`.
void quantize_into(const CodePlane& plane, const CodeMemory& memory, const at::Tensor& values,
                   bool inputs_first = false, const std::optional<at::Tensor>& amax = std::nullopt);
Codes quantized(const CodePlane& plane, const at::Tensor& values);

// Returns a [m, k] @ b [k, n] in `dtype`: the sum of the products of dequantized numbers, which is kept in float32. On
// a GPU by torch._scaled_mm; on CPUs too, where scales do not vary along k, else by that definition. `fast`: a GPU may
// add up in fewer bits than float32.
//
// The result is bfloat16 for any `dtype` where a GPU multiplies by scales of rows: torch returns no other dtype there.
at::Tensor scaled_product(const Codes& a, const Codes& b, at::ScalarType dtype, bool fast);

// out = in + alpha * a @ b, or alpha * a @ b if `in` is undefined, as gemm() of dequantized numbers, which it is on
// CPUs. On a GPU by one call of cuBLASLt; where that has no kernel, scaled_product() is added.
void scaled_gemm(const at::Tensor& out, const at::Tensor& in, const Codes& a, const Codes& b, double alpha = 1.0);

}  // namespace rtp
