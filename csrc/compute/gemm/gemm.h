// The GEMMs of rotated operations: strided outputs, accumulation with beta = 1, 16-bit operands into float32 sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rtp {

// The dtype that sums of several products are kept in: float32 for 16-bit dtypes, else the dtype itself.
at::ScalarType accumulation_dtype(at::ScalarType dtype);

// out = in + alpha * a @ b, or alpha * a @ b where `in` is undefined. a [m, k], b [k, n], in and out [m, n], all 2-D,
// any strides; `in` may also be a bias [n]. `in` may be `out`, and then is added to where it is. out may be float32
// where a and b have 16 bits: the products are then summed in float32.
void gemm(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha = 1.0);

// The same on a GPU, with a and b of one 16-bit dtype and out in float32: one call of cuBLAS or, where `in` is another
// matrix than `out`, of cuBLASLt, which adds to one and writes the other. A bias, or an `in` of other strides or dtype,
// is copied first.
void gemm_to_wider(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha);

// out = a @ b + bias, or its GELU in the tanh form, in one call of cuBLASLt, on a GPU and with all in one 16-bit dtype;
// `before`, where it is defined, gets what the GELU is applied to. Rounded once. `bias` may be undefined for a GELU.
// False, and nothing is done, where cuBLASLt takes these matrices not as they are, or has no kernel for them.
//
// Of cuBLASLt's epilogues these alone are taken: its GELU is the tanh form, whatever is asked for; its ReLU keeps one
// bit a number for a backward, not the number, and what becomes of a NaN there nothing says.
bool gemm_epilogue(const at::Tensor& out, const at::Tensor& before, const at::Tensor& bias, const at::Tensor& a,
                   const at::Tensor& b, bool gelu_tanh);

// Whether two tensors are the same view of the same memory.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

// A sum of products that starts when the first one is added, in the accumulation dtype of its operands.
class ProductSum {
 public:
  ProductSum(int64_t rows, int64_t columns, at::TensorOptions operands);

  void add(const at::Tensor& a, const at::Tensor& b);
  // The sum; zeros where nothing was added. Still in the accumulation dtype.
  at::Tensor result();

 private:
  at::Tensor sum_;
  bool started_ = false;
};

// out = in, or zeros where `in` is undefined.
void pass_on(const at::Tensor& out, const at::Tensor& in);

// out = in + alpha * values.sum(0), or alpha * values.sum(0) where `in` is undefined.
void column_sum(const at::Tensor& out, const at::Tensor& in, const at::Tensor& values, double alpha);

}  // namespace rtp
