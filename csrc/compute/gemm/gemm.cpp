#include "compute/gemm/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

namespace rtp {

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

at::Tensor aligned_bias(const at::Tensor& bias) {
  return reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 == 0 ? bias : bias.clone();
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

void gemm(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha) {
  at::Tensor result = out;  // ATen's out arguments are non-const handles
  if (a.scalar_type() == out.scalar_type()) {
#ifdef RTP_WITH_CUDA
    // torch fuses the bias only if `out` is contiguous; otherwise it first copies the bias into every row
    const bool biased = in.defined() && in.dim() == 1 && in.scalar_type() == out.scalar_type() && alpha == 1.0;
    if (a.is_cuda() && biased && !out.is_contiguous() && gemm_epilogue(out, {}, in, a, b, false)) return;
#endif
    if (!in.defined()) {
      // beta = 0: the old values of `out` are ignored, including NaNs
      at::addmm_out(result, out, a, b, /*beta=*/0.0, alpha);
    } else {
      // with another handle to the same memory, addmm_out would first copy it onto itself
      const bool bias = in.dim() == 1 && a.is_cuda();
      at::addmm_out(result, same_memory(in, out) ? result : bias ? aligned_bias(in) : in, a, b, /*beta=*/1.0, alpha);
    }
    return;
  }
  const bool widens = c10::elementSize(a.scalar_type()) < c10::elementSize(out.scalar_type());
  if (a.is_cpu() && widens) {
    gemm(out, in, a.to(out.scalar_type()), b.to(out.scalar_type()), alpha);
    return;
  }
  const bool into_float = widens && out.scalar_type() == at::kFloat;
#ifdef RTP_WITH_CUDA
  if (a.is_cuda() && into_float) {
    gemm_to_wider(out, in, a, b, alpha);
    return;
  }
#endif
  // For every other pair of dtypes the product is rounded when it is added.
  const at::Tensor product = into_float ? at::mm(a, b, at::kFloat) : at::mm(a, b);
  if (in.defined()) {
    at::add_out(result, in, product, alpha);
  } else {
    result.copy_(product.mul(alpha));
  }
}

at::Tensor laid_scales(const at::Tensor& scales, ScaledMatrix::Scales kind) {
  if (kind == ScaledMatrix::Scales::of_128) return scales.t().contiguous().t();
  if (kind != ScaledMatrix::Scales::of_128x128) return scales;
  const int64_t high = scales.size(0), wide = scales.size(1), stride = (wide + 3) / 4 * 4;
  if ((wide == 1 || scales.stride(1) == 1) && (high == 1 || scales.stride(0) == stride)) return scales;
  at::Tensor laid = at::empty({high, stride}, scales.options()).narrow(1, 0, wide);
  return laid.copy_(scales);
}

ProductSum::ProductSum(int64_t rows, int64_t columns, at::TensorOptions operands)
    : sum_(at::empty({rows, columns},
                     operands.dtype(accumulation_dtype(c10::typeMetaToScalarType(operands.dtype()))))) {}

void ProductSum::add(const at::Tensor& a, const at::Tensor& b) {
  add([&](const at::Tensor& out, const at::Tensor& in) { gemm(out, in, a, b); });
}

at::Tensor ProductSum::result() {
  if (!started_) sum_.zero_();
  started_ = true;
  return sum_;
}

void copy_or_zero(const at::Tensor& out, const at::Tensor& in) {
  if (!in.defined()) {
    out.zero_();
  } else if (in.data_ptr() != out.data_ptr()) {
    out.copy_(in);
  }
}

void column_sum(const at::Tensor& out, const at::Tensor& in, const at::Tensor& values, double alpha) {
  const at::Tensor sum = at::sum(values, 0, /*keepdim=*/false, out.scalar_type()).mul_(alpha);
  if (in.defined()) {
    at::Tensor result = out;
    at::add_out(result, in, sum);
  } else {
    out.copy_(sum);
  }
}

}  // namespace rtp
