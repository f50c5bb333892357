#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include "base/handles.h"
#include "compute/gemm.h"
#include "compute/gemm_layout.h"

#define RTP_CUBLAS_CHECK(call)                                                                                    \
  do {                                                                                                            \
    const cublasStatus_t rtp_status = (call);                                                                     \
    if (rtp_status != CUBLAS_STATUS_SUCCESS)                                                                      \
      throw ::rtp::CudaError(::rtp::concat(#call, " failed with code ", static_cast<int>(rtp_status), " (",       \
                                           cublasGetStatusString(rtp_status), ") at ", __FILE__, ":", __LINE__)); \
  } while (false)

namespace rtp {
namespace {

MatrixLayout layout_of(const at::Tensor& matrix) {
  return {matrix.size(0), matrix.size(1), matrix.stride(0), matrix.stride(1)};
}

at::Tensor as_blas_matrix(const at::Tensor& operand) {
  return is_blas_matrix(layout_of(operand)) ? operand : operand.contiguous();
}

cudaDataType data_type(at::ScalarType dtype) {
  RTP_ASSERT(dtype == at::kBFloat16 || dtype == at::kHalf, "no GEMM of ", dtype, " into float32");
  return dtype == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

// Where torch has this check (some versions need a workspace setting for reproducible results), it holds here too.
template <typename Context>
void alert_not_deterministic(const Context& context) {
  if constexpr (requires { context.alertCuBLASConfigNotDeterministic(); }) context.alertCuBLASConfigNotDeterministic();
}

}  // namespace

void gemm_widening(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b,
                   double alpha) {
  if (out.numel() == 0) return;
  if (!is_blas_matrix(layout_of(out))) {
    const at::Tensor room = at::empty(out.sizes(), out.options());
    gemm_widening(room, in, a, b, alpha);
    out.copy_(room);
    return;
  }
  const int64_t inner = a.size(1);
  if (in.defined() && !same_memory(in, out)) out.copy_(in);  // a bias is broadcast
  if (inner == 0) {
    if (!in.defined()) out.zero_();
    return;
  }
  const at::Tensor first = as_blas_matrix(a), second = as_blas_matrix(b);
  const auto layout = gemm_layout(layout_of(out), layout_of(first), layout_of(second));
  RTP_ASSERT(layout.has_value(), "no BLAS layout for strides ", out.strides(), first.strides(), second.strides());

  const c10::cuda::CUDAGuard guard(out.device());
  alert_not_deterministic(at::globalContext());
  const float factor = static_cast<float>(alpha);
  const float keep = in.defined() ? 1.0f : 0.0f;
  const at::Tensor& left = layout->left_is_b ? second : first;
  const at::Tensor& right = layout->left_is_b ? first : second;
  const auto operation = [](bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
  // Torch's handle: on the current stream, with torch's workspace. Its flags about TF32 and about sums in less than
  // float32 concern float32 operands and 16-bit results, of which there are none.
  RTP_CUBLAS_CHECK(cublasGemmEx_64(
      at::cuda::getCurrentCUDABlasHandle(), operation(layout->transpose_left), operation(layout->transpose_right),
      layout->m, layout->n, layout->k, &factor, left.const_data_ptr(), data_type(left.scalar_type()),
      layout->left_stride, right.const_data_ptr(), data_type(right.scalar_type()), layout->right_stride, &keep,
      out.data_ptr(), CUDA_R_32F, layout->out_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace rtp
