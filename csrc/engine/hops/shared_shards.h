// Shards in memory that all ranks of a host map: a forward computes with another rank's shard where it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/hops/slots.h"
#include "transport/shm/shared_memory.h"

namespace rtp {

// The shards of one rank, in shared memory of its own, and read-only views of the shards of its peers. The memory of a
// peer stays valid when its process ends: the mapping keeps it.
class SharedShards {
 public:
  // Creates memory for `bytes` bytes of this rank's shards.
  SharedShards(int rank, int ranks, int64_t bytes);

  // The memory for this rank's shards [bytes], as bytes. It lives as long as a tensor refers to it.
  at::Tensor memory() const;
  std::string address() const;
  // Maps the memory of all ranks. `offsets`: by rank, the byte offset of every parameter's shard in its memory. Throws
  // RotationError that names an unreachable rank (another host, container or user).
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets);

  // Returns the shard of `owner`, of this shape, of the parameter whose shard on this rank is `local`. Throws
  // ValueError if `local` is not in the shared memory any more.
  at::Tensor of(const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const;

 private:
  const int rank_;
  const int ranks_;
  std::shared_ptr<SharedMemory> own_;
  std::vector<SharedMemory> peers_;                                         // by rank; empty for this one
  std::unordered_map<const std::byte*, std::vector<const std::byte*>> at_;  // by address here: the address by owner
};

// The shared weights of one pass.
class SharedWeights {
 public:
  // Returns the shard of `owner` of each tensor of a bundle: the shard where it lies, or a copy in the compute dtype,
  // which is kept until the next owner.
  const std::vector<at::Tensor>& of(const SharedShards& shards, const ShardBundle& bundle, int owner);

 private:
  std::vector<at::Tensor> tensors_;
  int owner_ = kAllOwners;  // of `tensors_`
};

}  // namespace rtp
