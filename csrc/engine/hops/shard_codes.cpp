#include "engine/hops/shard_codes.h"

#include <utility>

namespace rtp {
namespace {

CodeMemory memory_for(const at::Tensor& shard, const Coding& coding) {
  int64_t outputs = shard.size(-2), inputs = shard.size(-1);
  if (coding.inputs_first) std::swap(outputs, inputs);
  const auto stacked = shard.dim() > 2 ? std::optional(shard.size(0)) : std::nullopt;
  return empty_codes(coding.plane, outputs, inputs, shard.device(), stacked);
}

}  // namespace

ShardCodes::ShardCodes(const at::Tensor& shard, const Coding& coding, int64_t& made)
    : shard_(shard),
      coding_(coding),
      versioned_(!shard.is_inference()),
      memory_(memory_for(shard, coding)),
      made_(made) {}

void ShardCodes::refresh(std::optional<int64_t> version) {
  if (current(version)) return;
  const at::Tensor shard = shard_.lock();
  if (!shard.defined()) return;
  version_.reset();  // until all codes are made
  const auto make = [&](const CodeMemory& memory, const at::Tensor& matrix) {
    quantize_into(coding_.plane, memory, matrix.to(coding_.dtype), coding_.inputs_first);
  };
  if (shard.dim() == 2) make(memory_, shard);
  for (int64_t matrix = 0; shard.dim() > 2 && matrix < shard.size(0); ++matrix) {
    make(memory_.of(matrix), shard.select(0, matrix));
  }
  version_ = version;
  ++made_;
}

std::shared_ptr<ShardCodes> CodeCache::of(const at::Tensor& shard, const Coding& coding) {
  const auto [first, last] = codes_.equal_range(shard.const_data_ptr());
  for (auto each = first; each != last; ++each) {
    if (each->second->of(shard, coding)) return each->second;
  }
  std::erase_if(codes_, [](const auto& each) { return !each.second->alive(); });
  return codes_.emplace(shard.const_data_ptr(), std::make_shared<ShardCodes>(shard, coding, made_))->second;
}

void CodeCache::forget(const at::Tensor& shard) { codes_.erase(shard.const_data_ptr()); }

int64_t CodeCache::bytes() const {
  int64_t bytes = 0;
  for (const auto& [address, codes] : codes_) bytes += codes->alive() ? codes->bytes() : 0;
  return bytes;
}

}  // namespace rtp
