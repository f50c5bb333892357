// Contributions to gradients that travel in fewer bits than they are summed in.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/hops/slots.h"

namespace rtp {

// Brings what has arrived to tensors, in whatever bits it came: overwrites them, or adds to them.
void dequantize_into(Streams& streams, std::vector<at::Tensor> to, std::vector<at::Tensor> from, bool add);

// What a pass computes its contributions in: one slot, as wide as the gradient at home. Every wgrad sums in it, and
// what it has summed is rounded once, on its way to the slot that it leaves from. Only computes of one lane touch it.
class GradientQuantizer {
 public:
  // `gradient`: its local tensors have more bits than its parts.
  GradientQuantizer(SlotPool& pool, Streams& streams, const ShardBundle& gradient);
  GradientQuantizer(const GradientQuantizer&) = delete;
  GradientQuantizer& operator=(const GradientQuantizer&) = delete;
  ~GradientQuantizer() { pool_.give_back(Channel::gradient, std::move(slot_)); }

  std::vector<at::Tensor> views(int owner) const;
  // Rounds the contribution to the gradient of `owner` into its travelling form.
  void round(const std::vector<at::Tensor>& travelling, int owner) const;

 private:
  SlotPool& pool_;
  ShardBundle wide_;
  std::shared_ptr<Slot> slot_;
};

}  // namespace rtp
