#include "engine/hops/shard_codes.h"

#include <ATen/ops/full.h>

#include <utility>

#include "base/checks.h"

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
  std::optional<at::Tensor> amax;
  if (coding_.plane.whole && shard.dim() == 2 && shard.numel() > 0) {  // matrices of a stack are whole
    RTP_CHECK_VALUE(
        amax_.has_value(), "codes of a shard of shape ", shard.sizes(),
        ": expected the largest magnitude of the whole weight, which ranks exchange in a forward, got none");
    // rounded as the weight: the largest of the rounded numbers
    const at::TensorOptions options = shard.options().dtype(at::kFloat);
    amax = at::full({1, 1}, *amax_, options).to(coding_.dtype).to(at::kFloat);
  }
  const auto make = [&](const CodeMemory& memory, const at::Tensor& matrix) {
    quantize_into(coding_.plane, memory, matrix.to(coding_.dtype), coding_.inputs_first, amax);
  };
  if (shard.dim() == 2) make(memory_, shard);
  for (int64_t matrix = 0; shard.dim() > 2 && matrix < shard.size(0); ++matrix) {
    make(memory_.of(matrix), shard.select(0, matrix));
  }
  version_ = version;
  ++made_;
}

void ShardCodes::set_amax(float amax, std::optional<int64_t> version) {
  amax_version_ = version;
  if (amax_ == amax) return;
  amax_ = amax;
  version_.reset();
}

void ShardCodes::expect_amax(std::optional<int64_t> version) const {
  RTP_CHECK_VALUE(!coding_.plane.whole || !amax_version_ || !version || amax_version_ == version,
                  "codes with one scale of all shards: expected a weight that is not written between the beginning of "
                  "a forward, where ranks exchange its largest magnitude, and its product, got one that was");
}

std::shared_ptr<ShardCodes> CodeCache::of(const at::Tensor& shard, const Coding& coding) {
  const auto [first, last] = codes_.equal_range(shard.const_data_ptr());
  for (auto each = first; each != last; ++each) {
    if (each->second->of(shard, coding)) return each->second;
  }
  std::erase_if(codes_, [](const auto& each) { return !each.second->alive(); });
  const auto made = codes_.emplace(shard.const_data_ptr(), std::make_shared<ShardCodes>(shard, coding, made_))->second;
  if (const Amax* amax = amax_of(shard)) made->set_amax(amax->value, amax->version);
  return made;
}

const CodeCache::Amax* CodeCache::amax_of(const at::Tensor& shard) const {
  const auto [first, last] = amaxes_.equal_range(shard.const_data_ptr());
  for (auto each = first; each != last; ++each) {
    if (each->second.shard.is(shard)) return &each->second;
  }
  return nullptr;
}

void CodeCache::set_amax(const at::Tensor& shard, float amax, std::optional<int64_t> version, int64_t phase) {
  if (Amax* known = const_cast<Amax*>(amax_of(shard))) {
    known->value = amax, known->version = version, known->phase = phase;
  } else {
    std::erase_if(amaxes_, [](const auto& each) { return !each.second.shard.lock().defined(); });
    amaxes_.emplace(shard.const_data_ptr(), Amax{WeakTensor(shard), amax, version, phase});
  }
  const auto [first, last] = codes_.equal_range(shard.const_data_ptr());
  for (auto each = first; each != last; ++each) {
    if (each->second->of(shard)) each->second->set_amax(amax, version);
  }
}

bool CodeCache::has_amax(const at::Tensor& shard, int64_t phase) const {
  const Amax* amax = amax_of(shard);
  return amax != nullptr && amax->phase == phase;
}

void CodeCache::forget(const at::Tensor& shard) { codes_.erase(shard.const_data_ptr()); }

int64_t CodeCache::bytes() const {
  int64_t bytes = 0;
  for (const auto& [address, codes] : codes_) bytes += codes->alive() ? codes->bytes() : 0;
  return bytes;
}

}  // namespace rtp
