#include "compute/gemm/gemm_layout.h"

#include <algorithm>

namespace rtp {
namespace {

MatrixLayout transposed(const MatrixLayout& matrix) {
  return {matrix.columns, matrix.rows, matrix.column_stride, matrix.row_stride};
}

// An operand of a column-major GEMM: stored directly or transposed.
struct Operand {
  bool transpose;
  int64_t stride;
};

std::optional<Operand> operand(const MatrixLayout& matrix) {
  if (const auto stride = column_major_stride(matrix)) return Operand{false, *stride};
  if (const auto stride = column_major_stride(transposed(matrix))) return Operand{true, *stride};
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> column_major_stride(const MatrixLayout& matrix) {
  const int64_t least = std::max<int64_t>(matrix.rows, 1);
  if (matrix.rows > 1 && matrix.row_stride != 1) return std::nullopt;
  if (matrix.columns <= 1) return least;
  if (matrix.column_stride < least) return std::nullopt;
  return matrix.column_stride;
}

int64_t aligned_stride(int64_t columns, int64_t element_bytes) {
  const int64_t elements = std::max<int64_t>(16 / element_bytes, 1);
  return (columns + elements - 1) / elements * elements;
}

bool is_blas_matrix(const MatrixLayout& matrix) { return operand(matrix).has_value(); }

std::optional<GemmLayout> gemm_layout(const MatrixLayout& out, const MatrixLayout& a, const MatrixLayout& b) {
  GemmLayout layout;
  auto out_stride = column_major_stride(transposed(out));
  layout.left_is_b = out_stride.has_value();
  if (!out_stride) out_stride = column_major_stride(out);
  if (!out_stride) return std::nullopt;
  const auto left = operand(layout.left_is_b ? transposed(b) : a);
  const auto right = operand(layout.left_is_b ? transposed(a) : b);
  if (!left || !right) return std::nullopt;
  layout.transpose_left = left->transpose;
  layout.transpose_right = right->transpose;
  layout.m = layout.left_is_b ? out.columns : out.rows;
  layout.n = layout.left_is_b ? out.rows : out.columns;
  layout.k = a.columns;
  layout.left_stride = left->stride;
  layout.right_stride = right->stride;
  layout.out_stride = *out_stride;
  return layout;
}

std::optional<int64_t> summand_stride(const GemmLayout& layout, const MatrixLayout& in) {
  return column_major_stride(layout.left_is_b ? transposed(in) : in);
}

}  // namespace rtp
