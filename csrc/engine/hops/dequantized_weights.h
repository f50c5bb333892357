// Weights that travel in fewer bits than they are computed with, and where they are widened again.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

// Of one pass: a place for each lane that computes with weights, which holds one shard at a time.
class DequantizedWeights {
 public:
  // The shard that `step` computes with, of what arrived: the same tensors where they travel as they are computed with.
  // Widens on the current lane, the step's; what it returned there for another owner is overwritten.
  std::vector<at::Tensor> of(SlotPool& pool, const std::optional<ShardBundle>& bundle, std::vector<at::Tensor> arrived,
                             const Step& step);
  void give_back(SlotPool& pool);

 private:
  struct Place {
    std::shared_ptr<Slot> slot;  // null: the lane has needed none yet
    int owner = kAllOwners;      // of the shard in it
  };

  std::array<Place, 2> places_;
};

}  // namespace rtp
