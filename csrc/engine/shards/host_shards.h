// Shards in memory of the host that other processes of the host can map.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/shards/shard_source.h"
#include "transport/shm/shared_memory.h"

namespace rtp {

// Common part of the sources of CPU ranks: this rank's memory, and that of the ranks that it maps, read-only. The
// memory of a rank stays valid when its process ends: the mappings keep it.
class HostShards : public ShardSource {
 public:
  // Allocates `bytes` bytes for this rank's shards.
  HostShards(int rank, int ranks, int64_t bytes);

  at::Device device() const override { return at::kCPU; }
  at::Tensor memory(int64_t offset, int64_t bytes) const override;
  bool maps(int owner) const override { return owner == rank() || mapped_[owner].data() != nullptr; }
  at::Tensor at(size_t parameter, const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const override;

 protected:
  static constexpr size_t kHeader = 64;  // bytes before the shards: the number of the memory

  std::byte* own_data() const { return own_->data() + kHeader; }
  int64_t own_bytes() const { return static_cast<int64_t>(own_->bytes() - kHeader); }
  std::string map_address() const { return MemoryAddress(*own_).text(); }

  void set_all_offsets(const std::vector<std::vector<int64_t>>& offsets);
  const std::vector<int64_t>& offsets_of(int owner) const { return offsets_[owner]; }
  // Maps the memory of another rank. Throws RotationError that names it.
  void map(int peer, const std::string& address, int64_t bytes, bool writable = false);
  const SharedMemory& memory_of(int owner) const { return owner == rank() ? *own_ : mapped_[owner]; }
  const std::byte* shard_of(int owner, size_t parameter) const {
    return memory_of(owner).data() + kHeader + offsets_[owner][parameter];
  }

 private:
  std::shared_ptr<SharedMemory> own_;
  std::vector<SharedMemory> mapped_;           // by rank; empty: not mapped
  std::vector<std::vector<int64_t>> offsets_;  // by rank and parameter
};

}  // namespace rtp
