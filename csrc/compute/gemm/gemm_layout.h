// How a product of matrices with any strides is put to a column-major BLAS. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <optional>

namespace rtp {

// A matrix in memory: element (i, j) is at i * row_stride + j * column_stride, in elements.
struct MatrixLayout {
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;
};

// One call of a column-major GEMM, C = op(left) op(right), with C [m, n], op(left) [m, k], op(right) [k, n], each
// stored with its leading dimension (*_stride). Where `left_is_b`, C is the transpose of out, and so left is b and
// right is a; else left is a and right is b.
struct GemmLayout {
  bool left_is_b = false;
  bool transpose_left = false, transpose_right = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t left_stride = 0, right_stride = 0, out_stride = 0;
};

// The row stride, in elements of `element_bytes`, of a matrix of our own whose rows start at multiples of 16 bytes:
// else a BLAS takes kernels that are several times slower.
int64_t aligned_stride(int64_t columns, int64_t element_bytes);

// The leading dimension of a matrix whose columns are consecutive elements, or nothing where they are not. Strides of
// dimensions of one element say nothing and are ignored.
std::optional<int64_t> column_major_stride(const MatrixLayout& matrix);

// Whether a BLAS takes a matrix as it is: stored column by column, or row by row.
bool is_blas_matrix(const MatrixLayout& matrix);

// The call for out = a @ b: out [m, n], a [m, k], b [k, n], none empty. Nothing where some matrix has consecutive
// elements along neither dimension, or overlaps itself: it has to be copied first.
std::optional<GemmLayout> gemm_layout(const MatrixLayout& out, const MatrixLayout& a, const MatrixLayout& b);

// The leading dimension of a matrix of the shape of `out` that such a call can add to without copying it into `out`
// first: one that is stored as `out` is, by rows or by columns. Nothing for any other.
std::optional<int64_t> summand_stride(const GemmLayout& layout, const MatrixLayout& in);

}  // namespace rtp
