// GEMMs of rotated operations: strided outputs, accumulation with beta = 1, 16-bit operands with float32 sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rtp {

// Returns the dtype for sums of several products: float32 for 16-bit dtypes, otherwise the dtype itself.
at::ScalarType accumulation_dtype(at::ScalarType dtype);

// out = in + alpha * a @ b, or alpha * a @ b if `in` is undefined. a [m, k], b [k, n], in and out [m, n], all 2-D with
// any strides; `in` may also be a bias [n]. `in` may be `out`, which then accumulates in place. `out` may be float32 if
// a and b have 16 bits; the sum is then computed in float32.
void gemm(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha = 1.0);

// The same on a GPU for a and b of one 16-bit dtype and out in float32. Uses one call of cuBLAS or, if `in` is a
// different matrix than `out`, of cuBLASLt, which reads C and writes D. A bias, an `in` with other strides or another
// dtype, and any `in` where cuBLASLt has no kernel, is first copied into `out`.
void gemm_to_wider(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha);

// An operand of 8 bits on a GPU: float8 codes, and scales as they lie in memory for cuBLASLt.
struct ScaledMatrix {
  // One; one for each row of `a` or column of `b`; or for blocks along what is summed, in its layouts.
  enum class Scales { one, outer, of_32, of_128, of_128x128 };
  at::Tensor codes, scales;
  Scales kind;
};

// Returns scales [blocks, blocks along what is summed] of an operand as they lie for torch._scaled_mm and cuBLASLt,
// which takes no strides of them: themselves or a copy, as of a slice.
at::Tensor laid_scales(const at::Tensor& scales, ScaledMatrix::Scales kind);

// gemm() for operands of 8 bits on a GPU, in one call of cuBLASLt: the sum is kept in float32, `out` and `in` have one
// of 16 bits or float32. Returns false, without side effects, where cuBLASLt has no kernel.
bool gemm_scaled(const at::Tensor& out, const at::Tensor& in, const ScaledMatrix& a, const ScaledMatrix& b,
                 double alpha);

// out = a @ b + bias, or its tanh-approximated GELU, in one cuBLASLt call on a GPU; all tensors have one 16-bit dtype.
// If `before` is defined, it receives the input of the GELU. The result is rounded once. `bias` may be undefined for a
// GELU. Returns false, without side effects, if cuBLASLt does not support these matrices or has no kernel for them.
//
// Only these epilogues of cuBLASLt are used. Its GELU is always the tanh form. Its ReLU stores one bit per number for a
// backward instead of the number, and its treatment of NaNs is undocumented.
bool gemm_epilogue(const at::Tensor& out, const at::Tensor& before, const at::Tensor& bias, const at::Tensor& a,
                   const at::Tensor& b, bool gelu_tanh);

// Returns a bias that starts at a multiple of 16 bytes: itself or a copy. The preferences of cuBLASLt's heuristic have
// no alignment of the bias. It is to follow from the address of the bias (cublasLt.h), but kernels that need 16 bytes
// were chosen for less (pytorch/pytorch#194497); torch's fused addmm calls the same kernels.
at::Tensor aligned_bias(const at::Tensor& bias);

// Returns whether two tensors are the same view of the same memory.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

// A sum of products in the accumulation dtype of its operands. The first product overwrites the uninitialized memory.
class ProductSum {
 public:
  ProductSum(int64_t rows, int64_t columns, at::TensorOptions operands);

  void add(const at::Tensor& a, const at::Tensor& b);
  // Adds what product(out, in) adds to `in`, or writes if that is undefined.
  template <typename Product>
  void add(const Product& product) {
    product(sum_, started_ ? sum_ : at::Tensor());
    started_ = true;
  }
  // Returns the sum, still in the accumulation dtype; zeros if no product was added.
  at::Tensor result();

 private:
  at::Tensor sum_;
  bool started_ = false;
};

// out = in, or zeros if `in` is undefined.
void copy_or_zero(const at::Tensor& out, const at::Tensor& in);

// out = in + alpha * values.sum(0), or alpha * values.sum(0) if `in` is undefined.
void column_sum(const at::Tensor& out, const at::Tensor& in, const at::Tensor& values, double alpha);

}  // namespace rtp
