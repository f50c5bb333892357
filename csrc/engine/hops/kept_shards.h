// Stages local shards for their hops, and keeps what a forward quantized until the backward of the same parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/hops/slots.h"
#include "engine/hops/weak_tensor.h"

namespace rtp {

// A forward quantizes every shard anew and keeps a copy of the bytes; the backward copies them instead of quantizing
// the same numbers again. Whether it does is decided by this rank alone: the bytes that travel are equal either way.
class KeptShards {
 public:
  // The pass that a bundle is staged for. `serial`, `versions`: of its parameters, see Context.
  struct Use {
    int64_t serial;
    Pass pass;
    std::vector<int64_t> versions;
  };

  explicit KeptShards(SlotPool& pool) : pool_(pool) {}

  // Copies the local tensors of `bundle` into `memory`: see ShardBundle::stage.
  void stage(Streams& streams, ShardBundle& bundle, const at::Tensor& memory, int rank, const Use& use);
  // Returns the memory of all shards to the pool.
  void drop();

  int64_t quantized() const { return quantized_; }  // local tensors that were quantized before a hop

 private:
  struct Kept {
    WeakTensor local;
    std::shared_ptr<Slot> slot;
    std::vector<int64_t> versions;
    int64_t forwards;  // without a backward so far
  };
  using Shards = std::multimap<int64_t, Kept>;  // by serial

  void quantize(const at::Tensor& to, const at::Tensor& local, const TensorLayout& layout, const Use& use);
  Shards::iterator find(const at::Tensor& local, const Use& use);
  Shards::iterator add(const at::Tensor& local, const TensorLayout& layout, const Use& use);
  Shards::iterator erase(Shards::iterator shard);

  SlotPool& pool_;
  Shards shards_;
  int64_t quantized_ = 0;
};

}  // namespace rtp
