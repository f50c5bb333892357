// A cuBLAS and a cuBLASLt in host memory, limited to the calls of the engine: products of 16-bit operands in float32,
// products with an epilogue, and products of codes of 8 bits. Calls that the real libraries reject fail; violated
// promises about strides or alignments are reported as mistakes.
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "../../../csrc/base/codes.h"
#include "../../../csrc/compute/gemm/gemm.cpp"
#include "../../../csrc/compute/gemm/gemm_cuda.cpp"
#include "../../../csrc/compute/gemm/gemm_layout.cpp"
#include "simulator.h"

namespace simulated {
namespace {

constexpr size_t kWorkspace = 1 << 16;

void note(const std::string& text) {
  const std::lock_guard lock(world().mutex);
  mistake(text);
}

struct Matrix {
  const void* data;
  int64_t rows, columns, stride;  // as stored, column-major
  cudaDataType type;
  bool transpose;
  const void* scales = nullptr;
  int32_t kind = 0;  // of scales
  bool right = false;

  bool eight_bits() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
  // Of a code of an operand: cuBLAS guide, narrow precision data types usage.
  float scale(int64_t outer, int64_t inner) const {
    const auto* const each = static_cast<const float*>(scales);
    const int64_t outers = transpose ? columns : right ? columns : rows, inners = transpose || right ? rows : columns;
    switch (kind) {
      case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F:
        return each[0];
      case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        return each[outer];
      case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        return each[outer + inner / 128 * outers];
      case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
        return each[inner / 128 + outer / 128 * (((inners + 127) / 128 + 3) / 4 * 4)];
      default: {
        const auto* const exponents = static_cast<const uint8_t*>(scales);
        return std::ldexp(1.0f, exponents[rtp::swizzled_place(outer, inner / 32, (inners + 31) / 32)] - 127);
      }
    }
  }

  float at(int64_t row, int64_t column) const {
    const int64_t index = transpose ? column + row * stride : row + column * stride;
    if (eight_bits()) {
      const float code = type == CUDA_R_8F_E4M3
                             ? static_cast<float>(static_cast<const c10::Float8_e4m3fn*>(data)[index])
                             : static_cast<float>(static_cast<const c10::Float8_e5m2*>(data)[index]);
      return code * (right ? scale(column, row) : scale(row, column));
    }
    if (type == CUDA_R_16BF) return static_cast<const c10::BFloat16*>(data)[index];
    if (type == CUDA_R_16F) return static_cast<const c10::Half*>(data)[index];
    return static_cast<const float*>(data)[index];
  }
};

void store(void* data, cudaDataType type, int64_t index, float value) {
  if (type == CUDA_R_16BF) {
    static_cast<c10::BFloat16*>(data)[index] = value;
  } else if (type == CUDA_R_16F) {
    static_cast<c10::Half*>(data)[index] = value;
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

// Applied to an element of D after the sum.
using Epilogue = std::function<float(int64_t row, int64_t column, float sum)>;

cublasStatus_t multiply(int64_t m, int64_t n, int64_t k, float alpha, const Matrix& a, const Matrix& b, float beta,
                        const Matrix& c, void* d, int64_t d_stride, const Epilogue& epilogue = {}) {
  for (const Matrix* matrix : {&a, &b, &c}) {
    if (matrix->stride < std::max<int64_t>(matrix->rows, 1)) return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (d_stride < std::max<int64_t>(m, 1)) return CUBLAS_STATUS_INVALID_VALUE;
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t row = 0; row < m; ++row) {
      float sum = 0;
      for (int64_t inner = 0; inner < k; ++inner) sum += a.at(row, inner) * b.at(inner, column);
      sum = alpha * sum + (beta == 0 ? 0 : beta * c.at(row, column));
      store(d, c.type, row + column * d_stride, epilogue ? epilogue(row, column, sum) : sum);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

// Contents of cuBLASLt's opaque structures.
struct Stored {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Operation {
  cublasOperation_t left = CUBLAS_OP_N, right = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_stride = 0;
  int32_t multiprocessors = 0;  // 0: all
  const void *left_scales = nullptr, *right_scales = nullptr;
  int32_t left_kind = 0, right_kind = 0;
};
struct Preference {
  uint64_t workspace = 0;
  std::array<uint32_t, 4> alignments{256, 256, 256, 256};  // the defaults
};
struct Algorithm {
  std::array<uint32_t, 4> alignments;
  int32_t multiprocessors;
};

// The SMs for which the last product launched; 0: all.
int32_t last_multiprocessors = 0;

template <typename Held, typename Opaque>
Held& held(Opaque* opaque) {
  static_assert(sizeof(Held) <= sizeof(Opaque));
  return *reinterpret_cast<Held*>(opaque);
}
template <typename Held, typename Opaque>
cublasStatus_t make(Opaque** made, const Held& value) {
  *made = new Opaque{};
  held<Held>(*made) = value;
  return CUBLAS_STATUS_SUCCESS;
}

Matrix matrix(const void* data, cublasLtMatrixLayout_t layout, cublasOperation_t operation) {
  const auto& stored = held<Stored>(layout);
  return {data,        static_cast<int64_t>(stored.rows), static_cast<int64_t>(stored.columns), stored.stride,
          stored.type, operation == CUBLAS_OP_T};
}

}  // namespace
}  // namespace simulated

using namespace simulated;

cublasHandle_t at::cuda::getCurrentCUDABlasHandle() { return nullptr; }
cublasLtHandle_t at::cuda::getCurrentCUDABlasLtHandle() { return nullptr; }
size_t at::cuda::getCUDABlasLtWorkspaceSize() { return kWorkspace; }
void* at::cuda::getCUDABlasLtWorkspace() {
  static std::vector<std::byte> workspace(kWorkspace);
  return workspace.data();
}

extern "C" {

const char* cublasGetStatusString(cublasStatus_t) { return "simulated error"; }

cublasStatus_t cublasGemmEx_64(cublasHandle_t, cublasOperation_t left, cublasOperation_t right, int64_t m, int64_t n,
                               int64_t k, const void* alpha, const void* a, cudaDataType a_type, int64_t a_stride,
                               const void* b, cudaDataType b_type, int64_t b_stride, const void* beta, void* c,
                               cudaDataType c_type, int64_t c_stride, cublasComputeType_t compute, cublasGemmAlgo_t) {
  called("cublasGemmEx_64");
  if (a_type != b_type || c_type != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  const bool turned_a = left == CUBLAS_OP_T, turned_b = right == CUBLAS_OP_T;
  return multiply(m, n, k, *static_cast<const float*>(alpha),
                  {a, turned_a ? k : m, turned_a ? m : k, a_stride, a_type, turned_a},
                  {b, turned_b ? n : k, turned_b ? k : n, b_stride, b_type, turned_b}, *static_cast<const float*>(beta),
                  {c, m, n, c_stride, c_type, false}, static_cast<float*>(c), c_stride);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  return make(made, Stored{type, rows, columns, stride});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return make(made, Operation{});
}
cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t what,
                                              const void* value, size_t bytes) {
  auto& mine = held<Operation>(operation);
  const auto take = [&](auto& field) {
    if (bytes != sizeof(field)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (what) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(mine.left);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(mine.right);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(mine.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(mine.bias);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return take(mine.aux);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
      return take(mine.multiprocessors);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(mine.left_scales);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(mine.right_scales);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
      return take(mine.left_kind);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return take(mine.right_kind);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return take(mine.aux_stride);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) { return make(made, Preference{}); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t what, const void* value,
                                                    size_t bytes) {
  auto& mine = held<Preference>(preference);
  if (what == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    if (bytes != sizeof(uint64_t)) return CUBLAS_STATUS_INVALID_VALUE;
    mine.workspace = *static_cast<const uint64_t*>(value);
    return CUBLAS_STATUS_SUCCESS;
  }
  const int which = what - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
  if (which < 0 || which > 3 || bytes != sizeof(uint32_t)) return CUBLAS_STATUS_INVALID_VALUE;
  mine.alignments[static_cast<size_t>(which)] = *static_cast<const uint32_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
  called("cublasLtMatmulAlgoGetHeuristic");
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (world().controls.lacks_products) {  // the other form of a refusal: no result
    *count = 0;
    return CUBLAS_STATUS_SUCCESS;
  }
  if (world().controls.lacks_epilogues && held<Operation>(operation).epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  results[0].state = CUBLAS_STATUS_SUCCESS;
  held<Algorithm>(&results[0].algo) = {held<Preference>(preference).alignments,
                                       held<Operation>(operation).multiprocessors};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void*, size_t,
                              cudaStream_t) {
  called("cublasLtMatmul");
  if (world().controls.refuses_products) return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto& mine = held<Operation>(operation);
  Matrix left = matrix(a, a_layout, mine.left), right = matrix(b, b_layout, mine.right);
  left.scales = mine.left_scales, left.kind = mine.left_kind;
  right.scales = mine.right_scales, right.kind = mine.right_kind, right.right = true;
  if (left.eight_bits() != (mine.left_scales != nullptr) || right.eight_bits() != left.eight_bits()) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (left.eight_bits()) {
    if (!left.transpose || right.transpose || left.stride % 16 != 0 || right.stride % 16 != 0) {
      return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (left.type == CUDA_R_8F_E5M2 && right.type == CUDA_R_8F_E5M2) return CUBLAS_STATUS_NOT_SUPPORTED;
    const auto wide = [](int32_t kind) {
      return kind == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || kind == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    };
    const bool alike = wide(left.kind) ? wide(right.kind) : left.kind == right.kind;
    if (!alike) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Matrix sum = matrix(c, c_layout, CUBLAS_OP_N), out = matrix(d, d_layout, CUBLAS_OP_N);
  const int64_t k = left.transpose ? left.rows : left.columns;
  if (k != (right.transpose ? right.columns : right.rows) || sum.rows != out.rows || sum.columns != out.columns ||
      (left.transpose ? left.columns : left.rows) != out.rows) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const void* addresses[] = {a, b, c, d};
  last_multiprocessors = mine.multiprocessors;
  if (held<const Algorithm>(const_cast<cublasLtMatmulAlgo_t*>(algorithm)).multiprocessors != mine.multiprocessors) {
    note("an algorithm for another number of SMs");
  }
  for (size_t i = 0; i < 4; ++i) {
    const auto& promised = held<const Algorithm>(const_cast<cublasLtMatmulAlgo_t*>(algorithm)).alignments[i];
    if (reinterpret_cast<uintptr_t>(addresses[i]) % promised != 0) note("cublasLtMatmul of less aligned memory");
  }
  const bool biased = (mine.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0,
             gelu = (mine.epilogue & CUBLASLT_EPILOGUE_GELU) != 0;
  const bool keeps = (mine.epilogue & CUBLASLT_EPILOGUE_GELU_AUX) == CUBLASLT_EPILOGUE_GELU_AUX;
  const int known = CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_GELU_AUX | CUBLASLT_EPILOGUE_DEFAULT;
  if ((mine.epilogue & ~known) != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (biased != (mine.bias != nullptr) || keeps != (mine.aux != nullptr)) note("an epilogue without its pointers");
  if (keeps && (mine.aux_stride % 8 != 0 || mine.aux_stride < out.rows || reinterpret_cast<uintptr_t>(mine.aux) % 16)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (biased && reinterpret_cast<uintptr_t>(mine.bias) % 16 != 0) note("an epilogue with a bias of less alignment");
  const Matrix bias{mine.bias, out.rows, 1, out.rows, out.type, false};
  const Epilogue epilogue = [&](int64_t row, int64_t column, float value) {
    if (biased) value += bias.at(row, 0);
    if (keeps) store(mine.aux, out.type, row + column * mine.aux_stride, value);
    if (!gelu) return value;
    return 0.5f * value * (1.0f + std::tanh(0.7978845608f * (value + 0.044715f * value * value * value)));
  };
  return multiply(out.rows, out.columns, k, *static_cast<const float*>(alpha), left, right,
                  *static_cast<const float*>(beta), sum, d, out.stride, epilogue);
}

}  // extern "C"

void bind_blas(pybind11::module_& m) {
  m.def("gemm_widening",
        [](const at::Tensor& out, const std::optional<at::Tensor>& in, const at::Tensor& a, const at::Tensor& b,
           double alpha) { rtp::gemm_to_wider(out, in.value_or(at::Tensor()), a, b, alpha); });
  m.def("gemm_scaled",
        [](const at::Tensor& out, const std::optional<at::Tensor>& in, const at::Tensor& a, const at::Tensor& of_a,
           int kind_a, const at::Tensor& b, const at::Tensor& of_b, int kind_b, double alpha) {
          const auto [left, right] =
              std::pair(static_cast<rtp::ScaledMatrix::Scales>(kind_a), static_cast<rtp::ScaledMatrix::Scales>(kind_b));
          return rtp::gemm_scaled(out, in.value_or(at::Tensor()), {a, rtp::laid_scales(of_a, left), left},
                                  {b, rtp::laid_scales(of_b.t(), right).t(), right}, alpha);
        });
  m.def("gemm_epilogue",
        [](const at::Tensor& out, const std::optional<at::Tensor>& before, const std::optional<at::Tensor>& bias,
           const at::Tensor& a, const at::Tensor& b, bool gelu_tanh) {
          return rtp::gemm_epilogue(out, before.value_or(at::Tensor()), bias.value_or(at::Tensor()), a, b, gelu_tanh);
        });
  m.def("last_multiprocessors", [] { return simulated::last_multiprocessors; });
  m.def("aligned_stride", &rtp::aligned_stride);
}
