// Maps a product of matrices with arbitrary strides to a column-major BLAS call. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <optional>

namespace rtp {

// A matrix in memory: element (i, j) is at offset i * row_stride + j * column_stride, in elements.
struct MatrixLayout {
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;
};

// One call of a column-major GEMM, C = op(left) op(right), with C [m, n], op(left) [m, k], op(right) [k, n], each
// stored with its leading dimension (*_stride). If `left_is_b`, C is the transpose of out, left is b and right is a;
// otherwise left is a and right is b.
struct GemmLayout {
  bool left_is_b = false;
  bool transpose_left = false, transpose_right = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t left_stride = 0, right_stride = 0, out_stride = 0;
};

// Returns the row stride, in elements of `element_bytes` bytes, for a new matrix whose rows start at multiples of 16
// bytes. With less alignment, BLAS libraries choose kernels that are several times slower.
int64_t aligned_stride(int64_t columns, int64_t element_bytes);

// Returns the leading dimension of a matrix whose columns are contiguous; nothing for other matrices. Ignores the
// strides of dimensions of size one.
std::optional<int64_t> column_major_stride(const MatrixLayout& matrix);

// Returns whether a BLAS accepts a matrix without a copy: its rows or its columns are contiguous.
bool is_blas_matrix(const MatrixLayout& matrix);

// Returns the call for out = a @ b: out [m, n], a [m, k], b [k, n], none of them empty. Returns nothing if a matrix is
// contiguous along neither dimension or overlaps itself; it must be copied first.
std::optional<GemmLayout> gemm_layout(const MatrixLayout& out, const MatrixLayout& a, const MatrixLayout& b);

// Returns the leading dimension of a summand C with the shape of `out` that the call can read directly; nothing if C is
// not stored in the same order (by rows or by columns) as `out`.
std::optional<int64_t> summand_stride(const GemmLayout& layout, const MatrixLayout& in);

}  // namespace rtp
