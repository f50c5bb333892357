#include "compute/gemm/grouped.h"

#include <ATen/ops/_grouped_mm.h>

#include <algorithm>
#include <atomic>

#include "base/checks.h"
#ifdef RTP_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#endif

namespace rtp {
namespace {

constexpr int64_t kMostGroups = 1024;  // limit of torch's kernel
constexpr int64_t kAligned = 16;       // bytes

std::atomic<int> assumed{0};

int capability_of(const at::Tensor& tensor) {
  if (assumed != 0) return assumed;
#ifdef RTP_WITH_CUDA
  if (tensor.is_cuda()) return at::cuda::getDeviceProperties(tensor.get_device())->major;
#else
  static_cast<void>(tensor);
#endif
  return 0;
}

// Same check as in torch: contiguous along one of the last two dimensions, and a stride that is a multiple of 16 bytes
// along the other.
bool is_aligned(const at::Tensor& matrix) {
  const auto bytes = static_cast<int64_t>(matrix.element_size());
  if (reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAligned != 0) return false;
  const auto along = [&](int64_t near, int64_t far) {
    return matrix.stride(near) == 1 && matrix.stride(far) >= std::max<int64_t>(matrix.size(near), 1) &&
           matrix.stride(far) * bytes % kAligned == 0;
  };
  return along(-2, -1) || along(-1, -2);
}

}  // namespace

std::optional<std::string> grouped_refusal(const at::Tensor& rows, const at::Tensor& stack) {
  const int capability = capability_of(rows);
  if (capability != 9 && capability != 10) {
    return concat("torch has no kernel for ",
                  rows.is_cuda() ? concat("compute capability ", capability, ".x") : "CPUs");
  }
  if (rows.scalar_type() != at::kBFloat16) return concat("torch has no kernel for ", rows.scalar_type());
  if (stack.size(0) < 2) return "there is one group";
  if (stack.size(0) > kMostGroups) return concat("there are more than ", kMostGroups, " groups");
  if (rows.size(0) == 0 || rows.size(1) == 0 || stack.size(2) == 0) return "there is nothing to multiply";
  if (!is_aligned(rows) || !is_aligned(stack) || (stack.stride(0) * 2) % kAligned != 0) {
    return concat("rows do not start at multiples of ", kAligned, " bytes");
  }
  return std::nullopt;
}

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& stack, const at::Tensor& ends) {
  return at::_grouped_mm(rows, stack, ends);
}

void choose_grouped_as_on(int capability) { assumed = capability; }

}  // namespace rtp
