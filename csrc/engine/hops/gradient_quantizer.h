// Contributions to gradients that travel in fewer bits than the dtype of their sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

// Dequantizes received data, by place, and adds them in this order to `to`, which `add` does not overwrite.
void dequantize_into(Streams& streams, std::vector<at::Tensor> to, std::vector<std::vector<at::Tensor>> from, bool add);

// Full-precision memory in which a pass computes its contributions: one slot in the dtype of the owner's gradient.
// Every wgrad accumulates there, and the sum is rounded once, into the slot that the hop sends. Only computes of one
// stream access it.
class GradientQuantizer {
 public:
  // `gradient`: local tensors have more bits than the layouts. `shards`: in a group.
  GradientQuantizer(SlotPool& pool, Streams& streams, const ShardBundle& gradient, int shards);
  GradientQuantizer(const GradientQuantizer&) = delete;
  GradientQuantizer& operator=(const GradientQuantizer&) = delete;
  ~GradientQuantizer() { pool_.give_back(Channel::gradient, std::move(slot_)); }

  std::vector<at::Tensor> views(const Place& place) const;
  // Rounds the contribution to the gradient of one owner into its travel format.
  void round(const std::vector<at::Tensor>& travelling, const Place& place) const;

 private:
  SlotPool& pool_;
  ShardBundle wide_;
  std::shared_ptr<Slot> slot_;
};

}  // namespace rtp
