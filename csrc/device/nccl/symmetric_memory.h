// Memory for NCCL's symmetric windows, counted by torch like any other.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace rtp {

// `bytes` uninitialised bytes [uint8] of ncclMemAlloc, by way of torch's caching allocator so that
// torch.cuda.memory_allocated counts them. Not cut out of a larger segment: a window wants the same offset in its
// allocation on every rank, and which free block the caching allocator picks may differ between ranks. Goes back to the
// GPU with the last tensor over it. Not while a graph is captured.
at::Tensor allocate_symmetric(int64_t bytes, at::Device device);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
