// The layout of a product, for Python's ctypes.
#include <cstring>

#include "compute/gemm/gemm_layout.h"

extern "C" {

// The layout of out = a @ b as {left is b, transpose left, transpose right, m, n, k, ld left, ld right, ld out}. Sizes
// and strides are {rows, columns, row stride, column stride}. Returns 0 if cuBLAS needs copies of the matrices.
int gemm_layout(const int64_t* out, const int64_t* a, const int64_t* b, int64_t* result) {
  const auto matrix = [](const int64_t* m) { return rtp::MatrixLayout{m[0], m[1], m[2], m[3]}; };
  const auto layout = rtp::gemm_layout(matrix(out), matrix(a), matrix(b));
  if (!layout) return 0;
  const int64_t values[] = {
      layout->left_is_b, layout->transpose_left, layout->transpose_right, layout->m,         layout->n,
      layout->k,         layout->left_stride,    layout->right_stride,    layout->out_stride};
  std::memcpy(result, values, sizeof(values));
  return 1;
}

}  // extern "C"
