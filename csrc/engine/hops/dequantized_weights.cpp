#include "engine/hops/dequantized_weights.h"

#include <utility>

#include "compute/frozen_blocks.h"
#include "compute/quantize.h"

namespace rtp {

namespace {

void dequantize_weight(const at::Tensor& to, const at::Tensor& from, const TensorLayout& layout) {
  if (layout.frozen) {
    dequantize_blocks(to, from, *layout.frozen);
  } else if (layout.travel == TravelFormat::int8) {
    dequantize(to, from);
  } else {
    to.copy_(from);
  }
}

}  // namespace

std::vector<at::Tensor> DequantizedWeights::of(SlotPool& pool, const std::optional<ShardBundle>& bundle,
                                               std::vector<at::Tensor> arrived, const Step& step) {
  const int64_t bytes = arrived.empty() ? 0 : bundle->dequantized_bytes();
  if (bytes == 0) return arrived;
  Place& place = places_[static_cast<size_t>(step.lane)];
  if (!place.slot) place.slot = pool.lease_scratch(bytes);
  const bool known = std::exchange(place.owner, step.owner) == step.owner;
  for (size_t index = 0; index < arrived.size(); ++index) {
    if (!bundle->layouts[index].quantized()) continue;
    const at::Tensor wide = bundle->dequantized(place.slot->memory, step.owner, index);
    if (!known) dequantize_weight(wide, arrived[index], bundle->layouts[index]);
    arrived[index] = wide;
  }
  return arrived;
}

void DequantizedWeights::give_back(SlotPool& pool) {
  for (Place& place : places_) {
    if (place.slot) pool.give_back_scratch(std::exchange(place, {}).slot);
  }
}

}  // namespace rtp
