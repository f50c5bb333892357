#include "engine/shards/shard_source.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <random>
#include <utility>

#include "base/checks.h"

namespace rtp {
namespace {

// The address of a tensor's first element, also if it has no elements.
const std::byte* start_of(const at::Tensor& tensor) {
  const auto* storage = static_cast<const std::byte*>(tensor.storage().data());
  return storage + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

ShardSource::ShardSource(int rank, int ranks, int64_t bytes)
    : rank_(rank), ranks_(ranks), own_(std::make_shared<SharedMemory>(kHeader + static_cast<size_t>(bytes))) {
  std::random_device random;
  const uint64_t number = (static_cast<uint64_t>(random()) << 32) | random();
  std::memcpy(own_->data(), &number, sizeof(number));
}

std::byte* ShardSource::own_data() const { return own_->data() + kHeader; }

int64_t ShardSource::own_bytes() const { return static_cast<int64_t>(own_->bytes() - kHeader); }

uint64_t ShardSource::number() const {
  uint64_t number;
  std::memcpy(&number, own_->data(), sizeof(number));
  return number;
}

at::Tensor ShardSource::memory(int64_t offset, int64_t bytes) const {
  RTP_CHECK_VALUE(offset >= 0 && bytes >= 0 && offset + bytes <= own_bytes(), "expected a place in ", own_bytes(),
                  " bytes, got ", bytes, " at ", offset);
  return at::from_blob(own_data() + offset, {bytes}, [own = own_](void*) {}, at::kByte);
}

void ShardSource::expect_counts(size_t addresses, size_t bytes, size_t offsets) const {
  const auto count = static_cast<size_t>(ranks_);
  RTP_CHECK_VALUE(addresses == count && bytes == count && offsets == count, "expected addresses, sizes and offsets of ",
                  ranks_, " ranks, got ", addresses, ", ", bytes, " and ", offsets);
}

void ShardSource::set_offsets(const std::vector<int64_t>& own) {
  for (size_t parameter = 0; parameter < own.size(); ++parameter) {
    parameters_[own_data() + own[parameter]] = parameter;
  }
}

size_t ShardSource::parameter_of(const at::Tensor& local) const {
  const auto found = parameters_.find(start_of(local));
  RTP_CHECK_VALUE(found != parameters_.end(), "a shard of shape ", local.sizes(),
                  " is not in the memory that ranks read: expected the parameters that rotate_for_inference made, got "
                  "others in their place (by load_state_dict(assign=True), to(), to_empty() or a copy of the model): "
                  "convert the model in its final dtype, and change values by rtp_ext.update_weights");
  return found->second;
}

at::Tensor ShardSource::at(const at::Tensor&, int, const std::vector<int64_t>&) const {
  throw RotationError("the shards of other ranks cannot be read where they lie");
}

void ShardSource::pull(const std::vector<at::Tensor>&, int, const std::vector<at::Tensor>&) {
  throw RotationError("the shards of other ranks are read where they lie");
}

const std::vector<at::Tensor>& SourcedWeights::of(SlotPool& pool, ShardSource& source, const ShardBundle& bundle,
                                                  int owner) {
  if (std::exchange(owner_, owner) == owner) return tensors_;
  tensors_.clear();
  std::vector<at::Tensor> found;
  if (source.maps()) {
    for (size_t index = 0; index < bundle.layouts.size(); ++index) {
      found.push_back(source.at(bundle.local[index], owner, bundle.layouts[index].wire_shape(owner)));
    }
  } else if (owner == source.rank()) {
    found = bundle.local;
  } else if (coming_ == owner) {
    coming_ = kAllOwners;
    found = in_slot(pool, bundle, owner, slot_);
    pulled_.get();
  } else {
    abandon();
    slot_ = 1 - slot_;
    found = in_slot(pool, bundle, owner, slot_);
    source.pull(bundle.local, owner, found);
  }
  const int next = this->next(source, owner);
  if (!source.maps() && next != source.rank()) {
    slot_ = 1 - slot_;
    std::vector<at::Tensor> targets = in_slot(pool, bundle, next, slot_);
    coming_ = next;
    pulled_ = std::async(std::launch::async, [&source, local = bundle.local, next, targets = std::move(targets)] {
      source.pull(local, next, targets);
    });
  }
  for (size_t index = 0; index < found.size(); ++index) {
    tensors_.push_back(found[index].to(bundle.layouts[index].wire_dtype()));
  }
  return tensors_;
}

int SourcedWeights::next(const ShardSource& source, int owner) const {
  do {
    owner = (owner + source.ranks() - 1) % source.ranks();
  } while (owner != source.rank() && !expected_.empty() && !expected_[owner]);
  return owner;
}

// Returns the places of a shard, in the dtypes of the local tensors, in one of the two slots.
std::vector<at::Tensor> SourcedWeights::in_slot(SlotPool& pool, const ShardBundle& bundle, int owner, size_t slot) {
  ShardBundle stored = bundle;
  for (size_t index = 0; index < stored.layouts.size(); ++index) {
    stored.layouts[index].dtype = bundle.local[index].scalar_type();
  }
  if (!slots_[slot]) slots_[slot] = pool.lease(Channel::weight, stored.slot_bytes());
  std::vector<at::Tensor> places;
  for (size_t index = 0; index < stored.layouts.size(); ++index) {
    places.push_back(stored.in_slot(slots_[slot]->memory, owner, index));
  }
  return places;
}

// Waits for a pull of a shard that the pass does not need: its slot must not be used again before.
void SourcedWeights::abandon() noexcept {
  coming_ = kAllOwners;
  if (pulled_.valid()) pulled_.wait();
  pulled_ = {};
}

void SourcedWeights::give_back(SlotPool& pool) {
  abandon();
  tensors_.clear();
  owner_ = kAllOwners;
  for (auto& slot : slots_) {
    if (slot) pool.give_back(Channel::weight, std::exchange(slot, nullptr));
  }
}

}  // namespace rtp
