#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/handles.h"
#include "compute/gemm/gemm.h"
#include "compute/gemm/gemm_layout.h"

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
  switch (dtype) {
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kFloat:
      return CUDA_R_32F;
    case at::kFloat8_e4m3fn:
      return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2:
      return CUDA_R_8F_E5M2;
    default:
      RTP_ASSERT(false, "no product of cuBLAS has operands of ", dtype);
  }
}

// Calls torch's determinism check (some versions require a workspace setting) if this version of torch has it.
template <typename Context>
void alert_not_deterministic(const Context& context) {
  if constexpr (requires { context.alertCuBLASConfigNotDeterministic(); }) context.alertCuBLASConfigNotDeterministic();
}

// One product in column-major BLAS form: D = factor * op(left) op(right) + keep * C, followed by the epilogue.
struct Product {
  GemmLayout layout;
  const void *left, *right, *c;
  void* d;
  int64_t c_stride;
  cudaDataType left_type, right_type, sums;  // `sums`: of C and D
  float factor, keep;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;  // one number per row of D, in the type of D
  void* before = nullptr;      // receives the input of the activation, in the type of D
  int64_t before_stride = 0;
  // Of operands of 8 bits, whose kinds of scales are cublasLtMatmulMatrixScale_t.
  const void *left_scales = nullptr, *right_scales = nullptr;
  int32_t left_kind = 0, right_kind = 0;
};

// Owner of an opaque cuBLASLt object.
template <typename Opaque, cublasStatus_t (*destroy)(Opaque*)>
struct Destroyer {
  void operator()(Opaque* made) const { destroy(made); }
};
template <typename Opaque, cublasStatus_t (*destroy)(Opaque*)>
using LtHandle = std::unique_ptr<Opaque, Destroyer<Opaque, destroy>>;
using Layout = LtHandle<cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutDestroy>;

Layout make_lt_layout(cudaDataType type, bool transpose, int64_t rows, int64_t columns, int64_t stride) {
  if (transpose) std::swap(rows, columns);
  cublasLtMatrixLayout_t made = nullptr;
  RTP_CUBLAS_CHECK(
      cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride));
  return Layout(made);
}

// Returns the alignment of an address in bytes, at most 256.
uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return static_cast<uint32_t>(std::min<uintptr_t>(bits & -bits, 256));
}

// The cuBLASLt heuristic takes longer than a launch, so its result is cached per kind of product.
using ProductKey = std::array<int64_t, 23>;

ProductKey key_of(const Product& product, int device, size_t workspace, int32_t multiprocessors) {
  const GemmLayout& layout = product.layout;
  return {layout.m,
          layout.n,
          layout.k,
          layout.left_stride,
          layout.right_stride,
          layout.out_stride,
          product.c_stride,
          layout.transpose_left,
          layout.transpose_right,
          product.left_type,
          product.right_type,
          product.sums,
          product.left_scales != nullptr,
          product.left_kind * 8 + product.right_kind,
          product.keep != 0,
          product.epilogue,
          alignment(product.bias) * 512 + alignment(product.before),
          product.before_stride,
          alignment(product.left) * 512 + alignment(product.right),
          alignment(product.c) * 512 + alignment(product.d),
          device,
          static_cast<int64_t>(workspace),
          multiprocessors};
}

// Returns the number of SMs for which products are to launch; 0: all.
int32_t target_multiprocessors(int device) {
  const std::optional<int32_t> others = at::globalContext()._SMCarveout_EXPERIMENTAL();
  if (!others) return 0;
  int all = 0;
  RTP_CUDA_CHECK(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device));
  return all - *others;
}

// Returns false, without side effects, if cuBLASLt has no kernel for the product.
bool multiply_and_add(const Product& product, int device) {
  const GemmLayout& layout = product.layout;
  cublasLtMatmulDesc_t made = nullptr;
  RTP_CUBLAS_CHECK(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const LtHandle<cublasLtMatmulDescOpaque_t, cublasLtMatmulDescDestroy> operation(made);
  const auto set = [&](cublasLtMatmulDescAttributes_t which, const auto& value) {
    RTP_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(made, which, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, layout.transpose_left ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, layout.transpose_right ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (product.epilogue != CUBLASLT_EPILOGUE_DEFAULT) set(CUBLASLT_MATMUL_DESC_EPILOGUE, product.epilogue);
  if (product.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
  const int32_t multiprocessors = target_multiprocessors(device);
  if (multiprocessors > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, multiprocessors);
  if (product.before != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.before);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.before_stride);
  }
#if CUDART_VERSION >= 12090
  if (product.left_scales != nullptr) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.left_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.right_scales);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, product.left_kind);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, product.right_kind);
  }
#endif
  // an operand, kind of scales or sum that a GPU does not combine is an invalid value, not always an unsupported one
  const auto refused = [&](cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED ||
           (product.left_scales != nullptr && status == CUBLAS_STATUS_INVALID_VALUE);
  };
  const Layout left = make_lt_layout(product.left_type, layout.transpose_left, layout.m, layout.k, layout.left_stride);
  const Layout right =
      make_lt_layout(product.right_type, layout.transpose_right, layout.k, layout.n, layout.right_stride);
  const Layout c = make_lt_layout(product.sums, false, layout.m, layout.n, product.c_stride);
  const Layout d = make_lt_layout(product.sums, false, layout.m, layout.n, layout.out_stride);

  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const size_t workspace = at::cuda::getCUDABlasLtWorkspaceSize();
  static std::mutex mutex;
  static std::map<ProductKey, std::optional<cublasLtMatmulAlgo_t>> known;
  std::optional<cublasLtMatmulAlgo_t> algorithm;
  const ProductKey key = key_of(product, device, workspace, multiprocessors);
  {
    const std::lock_guard lock(mutex);
    auto found = known.find(key);
    if (found == known.end()) {
      cublasLtMatmulPreference_t made_preference = nullptr;
      RTP_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&made_preference));
      const LtHandle<cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceDestroy> preference(made_preference);
      const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
        RTP_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(made_preference, what, &value, sizeof(value)));
      };
      prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(product.left));
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(product.right));
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(product.c));
      prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(product.d));
      cublasLtMatmulHeuristicResult_t best{};
      int count = 0;
      const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, made, left.get(), right.get(), c.get(),
                                                                   d.get(), made_preference, 1, &best, &count);
      if (!refused(status)) RTP_CUBLAS_CHECK(status);
      const bool some = status == CUBLAS_STATUS_SUCCESS && count > 0 && best.state == CUBLAS_STATUS_SUCCESS;
      found = known.emplace(key, some ? std::optional(best.algo) : std::nullopt).first;
    }
    algorithm = found->second;
  }
  if (!algorithm) return false;
  const cublasStatus_t status =
      cublasLtMatmul(handle, made, &product.factor, product.left, left.get(), product.right, right.get(), &product.keep,
                     product.c, c.get(), product.d, d.get(), &*algorithm, at::cuda::getCUDABlasLtWorkspace(), workspace,
                     c10::cuda::getCurrentCUDAStream().stream());
  if (refused(status)) {  // the heuristic was wrong; nothing has been computed
    const std::lock_guard lock(mutex);
    known[key] = std::nullopt;
    return false;
  }
  RTP_CUBLAS_CHECK(status);
  return true;
}

}  // namespace

void gemm_to_wider(const at::Tensor& out, const at::Tensor& in, const at::Tensor& a, const at::Tensor& b,
                   double alpha) {
  if (out.numel() == 0) return;
  if (!is_blas_matrix(layout_of(out))) {
    const at::Tensor dense = at::empty(out.sizes(), out.options());
    gemm_to_wider(dense, in, a, b, alpha);
    out.copy_(dense);
    return;
  }
  const bool separate = in.defined() && !same_memory(in, out);
  if (a.size(1) == 0) {
    if (separate) out.copy_(in);
    if (!in.defined()) out.zero_();
    return;
  }
  const at::Tensor first = as_blas_matrix(a), second = as_blas_matrix(b);
  const auto layout = gemm_layout(layout_of(out), layout_of(first), layout_of(second));
  RTP_ASSERT(layout.has_value(), "no BLAS layout for strides ", out.strides(), first.strides(), second.strides());

  const c10::cuda::CUDAGuard guard(out.device());
  alert_not_deterministic(at::globalContext());
  const float factor = static_cast<float>(alpha);
  const at::Tensor& left = layout->left_is_b ? second : first;
  const at::Tensor& right = layout->left_is_b ? first : second;
  if (separate && in.sizes() == out.sizes() && in.scalar_type() == out.scalar_type()) {
    if (const auto stride = summand_stride(*layout, layout_of(in))) {
      const Product product{*layout,
                            left.const_data_ptr(),
                            right.const_data_ptr(),
                            in.const_data_ptr(),
                            out.data_ptr(),
                            *stride,
                            data_type(left.scalar_type()),
                            data_type(left.scalar_type()),
                            CUDA_R_32F,
                            factor,
                            /*keep=*/1.0f};
      if (multiply_and_add(product, out.device().index())) return;
    }
  }
  if (separate) out.copy_(in);  // broadcasts a bias
  const float keep = in.defined() ? 1.0f : 0.0f;
  const auto operation = [](bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
  // torch's handle uses the current stream and torch's workspace. Its flags for TF32 and for reduced-precision sums
  // apply to float32 operands and 16-bit results only; neither occurs here.
  RTP_CUBLAS_CHECK(cublasGemmEx_64(
      at::cuda::getCurrentCUDABlasHandle(), operation(layout->transpose_left), operation(layout->transpose_right),
      layout->m, layout->n, layout->k, &factor, left.const_data_ptr(), data_type(left.scalar_type()),
      layout->left_stride, right.const_data_ptr(), data_type(right.scalar_type()), layout->right_stride, &keep,
      out.data_ptr(), CUDA_R_32F, layout->out_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

bool gemm_scaled(const at::Tensor& out, const at::Tensor& in, const ScaledMatrix& a, const ScaledMatrix& b,
                 double alpha) {
#if CUDART_VERSION < 12090
  return false;
#else
  const auto layout = gemm_layout(layout_of(out), layout_of(a.codes), layout_of(b.codes));
  // cuBLASLt multiplies codes that are contiguous along what is summed
  if (!layout || !layout->left_is_b || !layout->transpose_left || layout->transpose_right) return false;
  const at::Tensor& summand = in.defined() ? in : out;
  const auto stride = summand_stride(*layout, layout_of(summand));
  if (!stride || summand.scalar_type() != out.scalar_type()) return false;
  const auto kind = [](const ScaledMatrix& matrix) -> int32_t {
    switch (matrix.kind) {
      case ScaledMatrix::Scales::one:
        return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
      case ScaledMatrix::Scales::outer:
        return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
      case ScaledMatrix::Scales::of_32:
        return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
      case ScaledMatrix::Scales::of_128:
        return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
      default:
        return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    }
  };
  Product product{*layout,
                  b.codes.const_data_ptr(),
                  a.codes.const_data_ptr(),
                  summand.const_data_ptr(),
                  out.data_ptr(),
                  *stride,
                  data_type(b.codes.scalar_type()),
                  data_type(a.codes.scalar_type()),
                  data_type(out.scalar_type()),
                  static_cast<float>(alpha),
                  in.defined() ? 1.0f : 0.0f};
  product.left_scales = b.scales.const_data_ptr(), product.right_scales = a.scales.const_data_ptr();
  product.left_kind = kind(b), product.right_kind = kind(a);
  const c10::cuda::CUDAGuard guard(out.device());
  alert_not_deterministic(at::globalContext());
  return multiply_and_add(product, out.device().index());
#endif
}

bool gemm_epilogue(const at::Tensor& out, const at::Tensor& before, const at::Tensor& bias, const at::Tensor& a,
                   const at::Tensor& b, bool gelu_tanh) {
  const at::ScalarType dtype = out.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  if (out.numel() == 0 || a.size(1) == 0) return false;
  if (!is_blas_matrix(layout_of(a)) || !is_blas_matrix(layout_of(b))) return false;
  const auto layout = gemm_layout(layout_of(out), layout_of(a), layout_of(b));
  // the bias has one number per row of D, and D is the transpose of out
  if (!layout || !layout->left_is_b) return false;
  if (bias.defined() && bias.size(0) > 1 && bias.stride(0) != 1) return false;
  Product product{*layout,          b.const_data_ptr(), a.const_data_ptr(),
                  out.data_ptr(),   out.data_ptr(),     layout->out_stride,
                  data_type(dtype), data_type(dtype),   data_type(dtype),
                  /*factor=*/1.0f,
                  /*keep=*/0.0f};
  product.epilogue = !gelu_tanh          ? CUBLASLT_EPILOGUE_BIAS
                     : !before.defined() ? bias.defined() ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU
                     : bias.defined()    ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                         : CUBLASLT_EPILOGUE_GELU_AUX;
  const at::Tensor aligned = bias.defined() ? aligned_bias(bias) : bias;
  if (bias.defined()) product.bias = aligned.const_data_ptr();
  if (before.defined()) {
    const auto stride = column_major_stride({before.size(1), before.size(0), before.stride(1), before.stride(0)});
    product.before = before.data_ptr();
    if (!stride || *stride % 8 != 0 || alignment(product.before) < 16) return false;
    product.before_stride = *stride;
  }
  const c10::cuda::CUDAGuard guard(out.device());
  alert_not_deterministic(at::globalContext());
  return multiply_and_add(product, out.device().index());
}

}  // namespace rtp
