// Scratch memory for weights that travel in fewer bits than the compute dtype: rounded for the hop, or frozen in
// blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

// The dequantized weights of one pass: scratch memory for each compute stream, which holds one shard at a time.
class DequantizedWeights {
 public:
  // Returns the shard that `step` computes with, given the received tensors: the same tensors if they travel in the
  // compute dtype. Dequantizes on the compute stream of the step; overwrites the shard of another owner that it
  // returned there before.
  std::vector<at::Tensor> of(SlotPool& pool, const std::optional<ShardBundle>& bundle, std::vector<at::Tensor> arrived,
                             const Step& step);
  // Returns whether of() would dequantize for this step.
  bool converts(const std::optional<ShardBundle>& bundle, const Step& step) const {
    return bundle && bundle->dequantized_bytes() > 0 && places_[static_cast<size_t>(step.lane)].owner != step.owner;
  }
  void give_back(SlotPool& pool);

 private:
  struct Place {
    std::shared_ptr<Slot> slot;  // null: not needed so far on this stream
    int owner = kNoOwner;        // owner of the shard in it
  };

  std::array<Place, 2> places_;
};

}  // namespace rtp
