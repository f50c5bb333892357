#include "engine/hops/shared_shards.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <random>
#include <utility>

#include "base/checks.h"

namespace rtp {
namespace {

constexpr size_t kHeader = 64;  // bytes before the shards: a number that identifies the memory

uint64_t number_of(const SharedMemory& memory) {
  uint64_t number;
  std::memcpy(&number, memory.data(), sizeof(number));
  return number;
}

// The address of a tensor's first element, also if it has no elements.
const std::byte* start_of(const at::Tensor& tensor) {
  const auto* storage = static_cast<const std::byte*>(tensor.storage().data());
  return storage + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

SharedShards::SharedShards(int rank, int ranks, int64_t bytes)
    : rank_(rank), ranks_(ranks), own_(std::make_shared<SharedMemory>(kHeader + static_cast<size_t>(bytes))) {
  std::random_device random;
  const uint64_t number = (static_cast<uint64_t>(random()) << 32) | random();
  std::memcpy(own_->data(), &number, sizeof(number));
}

at::Tensor SharedShards::memory() const {
  return at::from_blob(
      own_->data() + kHeader, {static_cast<int64_t>(own_->bytes() - kHeader)}, [own = own_](void*) {}, at::kByte);
}

std::string SharedShards::address() const { return MemoryAddress(*own_, number_of(*own_)).text(); }

void SharedShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  const auto count = static_cast<size_t>(ranks_);
  RTP_CHECK_VALUE(addresses.size() == count && bytes.size() == count && offsets.size() == count,
                  "shared shards: expected ", ranks_, " addresses, sizes and lists of offsets");
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) {
      peers_.emplace_back();
      continue;
    }
    const auto named = [&](const auto&... what) { return concat("shared shards: rank ", peer, what...); };
    try {
      const MemoryAddress address(addresses[peer]);
      if (const auto where = address.out_of_reach()) throw RotationError(named(" is ", *where));
      peers_.emplace_back(address.pid, address.fd, kHeader + static_cast<size_t>(bytes[peer]), /*writable=*/false);
      if (number_of(peers_.back()) != address.nonce) throw RotationError(named(" is not process ", address.pid));
    } catch (const MemoryError& error) {
      throw RotationError(named(": ", error.what()));
    }
  }
  for (size_t parameter = 0; parameter < offsets[rank_].size(); ++parameter) {
    std::vector<const std::byte*> by_owner;
    for (int owner = 0; owner < ranks_; ++owner) {
      const SharedMemory& memory = owner == rank_ ? *own_ : peers_[owner];
      by_owner.push_back(memory.data() + kHeader + offsets[owner][parameter]);
    }
    at_[by_owner[rank_]] = std::move(by_owner);
  }
}

at::Tensor SharedShards::of(const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const {
  const auto found = at_.find(start_of(local));
  RTP_CHECK_VALUE(found != at_.end(), "a shard of shape ", local.sizes(),
                  " is not in the memory that the ranks share: "
                  "expected the parameters that rotate_for_inference made, got others in their place (by "
                  "load_state_dict(assign=True), to() or to_empty()): convert the model in its final dtype, and change "
                  "values by rtp_ext.update_weights");
  if (owner == rank_) return local;
  // Read-only memory: torch has no tensors that forbid writes, but a forward writes to no weight.
  auto* data = const_cast<std::byte*>(found->second[owner]);
  return at::from_blob(data, shape, local.options());
}

const std::vector<at::Tensor>& SharedWeights::of(const SharedShards& shards, const ShardBundle& bundle, int owner) {
  if (std::exchange(owner_, owner) == owner) return tensors_;
  tensors_.clear();
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    const TensorLayout& layout = bundle.layouts[index];
    tensors_.push_back(shards.of(bundle.local[index], owner, layout.shapes[owner]).to(layout.dtype));
  }
  return tensors_;
}

}  // namespace rtp
