#include "ops/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

namespace rtp {

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

void gemm(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b, double alpha) {
  at::Tensor result = out;  // ATen's out arguments are non-const handles
  if (a.scalar_type() == out.scalar_type()) {
    if (!in.defined()) {
      // beta = 0: what is in `out` is ignored, NaNs included
      at::addmm_out(result, out, a, b, /*beta=*/0.0, alpha);
    } else {
      at::addmm_out(result, in, a, b, /*beta=*/1.0, alpha);
    }
    return;
  }
  const bool widens = c10::elementSize(a.scalar_type()) < c10::elementSize(out.scalar_type());
  if (a.is_cpu() && widens) {
    gemm(out, in, a.to(out.scalar_type()), b.to(out.scalar_type()), alpha);
    return;
  }
  // CUDA multiplies 16-bit operands into float32; for every other pair the product is rounded when it is added.
  const bool native = widens && out.scalar_type() == at::kFloat;
  const at::Tensor product = native ? at::mm(a, b, at::kFloat) : at::mm(a, b);
  if (in.defined()) {
    at::add_out(result, in, product, alpha);
  } else {
    result.copy_(product.mul(alpha));
  }
}

ProductSum::ProductSum(int64_t rows, int64_t columns, at::TensorOptions operands)
    : sum_(at::empty({rows, columns},
                     operands.dtype(accumulation_dtype(c10::typeMetaToScalarType(operands.dtype()))))) {}

void ProductSum::add(const at::Tensor& a, const at::Tensor& b) {
  gemm(sum_, started_ ? sum_ : at::Tensor(), a, b);
  started_ = true;
}

at::Tensor ProductSum::result() {
  if (!started_) sum_.zero_();
  started_ = true;
  return sum_;
}

void pass_on(const at::Tensor& out, const at::Tensor& in) {
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
