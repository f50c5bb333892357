#include "engine/hops/kept_shards.h"

#include <algorithm>
#include <utility>

#include "compute/quantize.h"

namespace rtp {

namespace {

// The first bytes of a slot, as many as `like` has.
at::Tensor bytes_of(const Slot& slot, const at::Tensor& like) { return slot.memory.narrow(0, 0, like.numel()); }

}  // namespace

void KeptShards::stage(Streams& streams, ShardBundle& bundle, const at::Tensor& memory, int rank, const Use& use) {
  const bool captured = streams.capture() != 0;  // a replay would read memory that has been returned
  bundle.stage(streams, memory, rank, [&](const at::Tensor& to, const at::Tensor& local, const TensorLayout& layout) {
    if (layout.kept && use.serial != 0 && !captured) {
      quantize(to, local, layout, use);
    } else {
      rtp::quantize(to, local), ++quantized_;
    }
  });
}

void KeptShards::quantize(const at::Tensor& to, const at::Tensor& local, const TensorLayout& layout, const Use& use) {
  auto shard = find(local, use);
  const bool known = shard != shards_.end(), current = known && shard->second.versions == use.versions;
  if (use.pass == Pass::backward && current) {
    to.copy_(bytes_of(*shard->second.slot, to));
    if (--shard->second.forwards == 0) erase(shard);
    return;
  }
  rtp::quantize(to, local), ++quantized_;
  if (use.pass == Pass::backward) {
    if (known) erase(shard);
    return;
  }
  if (!known) shard = add(local, layout, use);
  Kept& kept = shard->second;
  kept.forwards = current ? kept.forwards + 1 : 1;
  kept.versions = use.versions;
  bytes_of(*kept.slot, to).copy_(to);
}

KeptShards::Shards::iterator KeptShards::find(const at::Tensor& local, const Use& use) {
  const auto [begin, end] = shards_.equal_range(use.serial);
  const auto found = std::find_if(begin, end, [&](const auto& shard) { return shard.second.local.is(local); });
  return found == end ? shards_.end() : found;
}

KeptShards::Shards::iterator KeptShards::add(const at::Tensor& local, const TensorLayout& layout, const Use& use) {
  if (pool_.needs_memory_to_keep()) {  // parameters may have been freed after a forward without a backward
    for (auto shard = shards_.begin(); shard != shards_.end();) {
      shard = shard->second.local.expired() ? erase(shard) : std::next(shard);
    }
  }
  int64_t most = 0;
  for (size_t owner = 0; owner < layout.shapes.size(); ++owner) {
    most = std::max(most, layout.bytes(static_cast<int>(owner)));
  }
  return shards_.emplace(use.serial, Kept{WeakTensor(local), pool_.lease_kept(most), {}, 0});
}

KeptShards::Shards::iterator KeptShards::erase(Shards::iterator shard) {
  pool_.give_back_kept(std::move(shard->second.slot));
  return shards_.erase(shard);
}

void KeptShards::drop() {
  for (auto shard = shards_.begin(); shard != shards_.end();) shard = erase(shard);
}

}  // namespace rtp
