// Memory for NCCL's symmetric windows, included in torch's memory statistics.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace rtp {

// Returns `bytes` uninitialized bytes [uint8] from ncclMemAlloc, allocated through torch's caching allocator so that
// torch.cuda.memory_allocated includes them. The memory is a segment of its own: a window needs the same offset in its
// allocation on every rank, and the caching allocator may choose different free blocks on different ranks. It returns
// to the GPU with the last tensor that uses it. Not allowed while a graph is captured.
at::Tensor allocate_symmetric(int64_t bytes, at::Device device);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
