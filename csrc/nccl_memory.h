// Memory that NCCL can register: slots from ncclMemAlloc that torch.cuda's memory statistics count.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace rtp {

// The id of a torch.cuda.MemPool over rtp_nccl_malloc and rtp_nccl_free, which this extension exports.
using PoolId = std::pair<uint64_t, uint64_t>;

// At least `bytes` bytes [uint8] of the pool, at an address that is a multiple of 2 MiB.
at::Tensor allocate_registrable(int64_t bytes, at::Device device, PoolId pool);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
