#include "engine/shards/host_shards.h"

#include <ATen/ops/from_blob.h>

#include "base/checks.h"

namespace rtp {

HostShards::HostShards(int rank, int ranks, int64_t bytes)
    : ShardSource(rank, ranks),
      own_(std::make_shared<SharedMemory>(SharedMemory::numbered(kHeader + static_cast<size_t>(bytes)))),
      mapped_(static_cast<size_t>(ranks)) {}

at::Tensor HostShards::memory(int64_t offset, int64_t bytes) const {
  RTP_CHECK_VALUE(offset >= 0 && bytes >= 0 && offset + bytes <= own_bytes(), "expected a place in ", own_bytes(),
                  " bytes, got ", bytes, " at ", offset);
  return at::from_blob(own_data() + offset, {bytes}, [own = own_](void*) {}, at::kByte);
}

void HostShards::set_all_offsets(const std::vector<std::vector<int64_t>>& offsets) {
  offsets_ = offsets;
  set_offsets(own_data(), offsets[rank()]);
}

void HostShards::map(int peer, const std::string& address, int64_t bytes, bool writable) {
  mapped_[peer] =
      map_numbered(address, kHeader + static_cast<size_t>(bytes), writable, concat("shared shards: rank ", peer));
}

at::Tensor HostShards::at(size_t parameter, const at::Tensor& local, int owner,
                          const std::vector<int64_t>& shape) const {
  if (owner == rank()) return local;
  // Read-only memory: torch has no tensors that forbid writes, but a forward writes to no weight.
  return at::from_blob(const_cast<std::byte*>(shard_of(owner, parameter)), shape, local.options());
}

}  // namespace rtp
