// Memory that NCCL can register: slots from ncclMemAlloc that torch.cuda's memory statistics count.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace rtp {

// The id of a torch.cuda.MemPool over rtp_nccl_malloc and rtp_nccl_free, which this extension exports.
using PoolId = std::pair<uint64_t, uint64_t>;

// At least `bytes` bytes [uint8] of the pool, and no less than 10 MiB, at the start of an allocation of ncclMemAlloc:
// NCCL finds a peer's part of a window by this rank's offset in its allocation, so that the offset must be the same on
// all.
at::Tensor allocate_registrable(int64_t bytes, at::Device device, PoolId pool);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
