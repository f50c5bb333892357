// Calls the CUDA kernels of this package with tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/checks.h"
#include "base/handles.h"
#include "kernels/common/elements.h"
#ifdef RTP_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace rtp {

// Returns the kernel element type for a dtype; nothing for dtypes without kernels, such as float64, which use ATen.
inline std::optional<Element> element_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return Element::float32;
  if (dtype == at::kBFloat16) return Element::bfloat16;
  if (dtype == at::kHalf) return Element::float16;
  return std::nullopt;
}

// Returns whether the kernels support these matrices: on a GPU, with a supported dtype and contiguous rows. Ignores
// undefined tensors.
template <typename... Tensors>
bool kernels_take(const Tensors&... tensors) {
#ifdef RTP_WITH_CUDA
  const auto supported = [](const at::Tensor& t) {
    return !t.defined() ||
           (t.is_cuda() && element_of(t.scalar_type()) && t.dim() == 2 && (t.size(1) <= 1 || t.stride(1) == 1));
  };
  return (supported(tensors) && ...);
#else
  return ((static_cast<void>(tensors), false) && ...);
#endif
}

// Calls launch(stream) with the current stream of the device of `tensor`, and checks the returned cudaError_t.
template <typename Launch>
void launch_on_device_of(const at::Tensor& tensor, Launch&& launch) {
#ifdef RTP_WITH_CUDA
  const c10::cuda::CUDAGuard guard(tensor.device());
  RTP_CUDA_CHECK(static_cast<cudaError_t>(launch(c10::cuda::getCurrentCUDAStream().stream())));
#else
  static_cast<void>(launch);
  RTP_ASSERT(false, "built without CUDA, but got a tensor on ", tensor.device().str());
#endif
}

}  // namespace rtp
