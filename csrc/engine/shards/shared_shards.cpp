#include "engine/shards/shared_shards.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "base/checks.h"

namespace rtp {

std::string SharedShards::address() const { return MemoryAddress(own(), number()).text(); }

void SharedShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == rank()) {
      peers_.emplace_back();
      continue;
    }
    const auto named = [&](const auto&... what) { return concat("shared shards: rank ", peer, what...); };
    try {
      const MemoryAddress address(addresses[peer]);
      if (const auto where = address.out_of_reach()) throw RotationError(named(" is ", *where));
      peers_.emplace_back(address.pid, address.fd, kHeader + static_cast<size_t>(bytes[peer]), /*writable=*/false);
      uint64_t number;
      std::memcpy(&number, peers_.back().data(), sizeof(number));
      if (number != address.nonce) throw RotationError(named(" is not process ", address.pid));
    } catch (const MemoryError& error) {
      throw RotationError(named(": ", error.what()));
    }
  }
  offsets_ = offsets;
  set_offsets(offsets[rank()]);
}

at::Tensor SharedShards::at(const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const {
  const size_t parameter = parameter_of(local);
  if (owner == rank()) return local;
  // Read-only memory: torch has no tensors that forbid writes, but a forward writes to no weight.
  return at::from_blob(peers_[owner].data() + kHeader + offsets_[owner][parameter], shape, local.options());
}

}  // namespace rtp
