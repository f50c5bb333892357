// Shards that copy engines copy to this rank's GPU; their owners take no part: from the GPUs of one host, or
// from memory of the host.
#pragma once

#ifdef RTP_WITH_CUDA

#include <chrono>
#include <memory>
#include <string>

#include "engine/shards/shard_source.h"

namespace rtp {

// This rank's shards lie in memory of its GPU that all ranks can access.
//
// `id`: one unique id of NCCL, the same on every rank; `bytes`: of the memory, the same on every rank. Collective, as
// connect() is. close() frees the memory: no rank may copy from it any more. Without it, the memory is never freed.
std::shared_ptr<ShardSource> make_copied_shards(const std::string& id, int rank, int ranks, int64_t bytes,
                                                at::Device device, std::chrono::milliseconds timeout);

// The shards of all ranks lie in memory of the host that each rank maps and pins: every shard, this rank's own too, is
// copied before a compute reads it. `bytes`: of this rank's shards. The memory of a rank stays when it ends.
std::shared_ptr<ShardSource> make_offloaded_shards(int rank, int ranks, int64_t bytes, at::Device device);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
