// Shards in memory that all ranks of a host map: a forward computes with another rank's shard where it lies.
#pragma once

#include <string>
#include <vector>

#include "engine/shards/shard_source.h"

namespace rtp {

// Maps the shards of the other ranks read-only. The memory of a rank stays valid when its process ends: the mappings
// keep it.
class SharedShards : public ShardSource {
 public:
  using ShardSource::ShardSource;

  std::string address() const override;
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override;
  bool maps() const override { return true; }
  at::Tensor at(const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const override;

 private:
  std::vector<SharedMemory> peers_;  // by rank; empty for this one
  std::vector<std::vector<int64_t>> offsets_;
};

}  // namespace rtp
