// Shards on the GPUs of one host, which copy engines copy from the memory of their owner.
#pragma once

#ifdef RTP_WITH_CUDA

#include <chrono>
#include <memory>
#include <string>

#include "engine/shards/shard_source.h"

namespace rtp {

// This rank's shards lie in memory that all ranks can access, and the owner takes no part in a copy. Copies run on a
// stream of their own, each after the computes that were enqueued before it; computes wait for the copy that they read.
//
// `id`: one unique id of NCCL, the same on every rank; `bytes`: of the memory, the same on every rank. Collective, as
// connect() is. close() frees the memory: no rank may copy from it any more. Without it, the memory is never freed.
std::shared_ptr<ShardSource> make_copied_shards(const std::string& id, int rank, int ranks, int64_t bytes,
                                                at::Device device, std::chrono::milliseconds timeout);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
