#include "engine/hops/shard_codes.h"

namespace rtp {

ShardCodes::ShardCodes(const at::Tensor& shard, const CodePlane& plane, at::ScalarType dtype, int64_t& made)
    : shard_(shard),
      plane_(plane),
      dtype_(dtype),
      versioned_(!shard.is_inference()),
      memory_(empty_codes(plane, shard.size(0), shard.size(1), shard.device())),
      made_(made) {}

void ShardCodes::refresh(std::optional<int64_t> version) {
  if (current(version)) return;
  const at::Tensor shard = shard_.lock();
  if (!shard.defined()) return;
  version_.reset();  // until all codes are made
  quantize_into(plane_, memory_, shard.to(dtype_));
  version_ = version;
  ++made_;
}

std::shared_ptr<ShardCodes> CodeCache::of(const at::Tensor& shard, const CodePlane& plane, at::ScalarType dtype) {
  const auto [first, last] = codes_.equal_range(shard.const_data_ptr());
  for (auto each = first; each != last; ++each) {
    if (each->second->of(shard, plane, dtype)) return each->second;
  }
  std::erase_if(codes_, [](const auto& each) { return !each.second->alive(); });
  return codes_.emplace(shard.const_data_ptr(), std::make_shared<ShardCodes>(shard, plane, dtype, made_))->second;
}

void CodeCache::forget(const at::Tensor& shard) { codes_.erase(shard.const_data_ptr()); }

int64_t CodeCache::bytes() const {
  int64_t bytes = 0;
  for (const auto& [address, codes] : codes_) bytes += codes->alive() ? codes->bytes() : 0;
  return bytes;
}

}  // namespace rtp
