// Gradients by direct reduction: every rank sends its contribution to the owner, without a travelling partial sum.
#pragma once

#include "schedule/builder.h"

namespace rtp {

// The gradients of a pass with gradient route direct, in a ring of at least two ranks.
//
// This rank's contribution to the gradient of shard r + s leaves for the owner as soon as it is computed, while the
// contribution of rank r - s to this rank's gradient arrives. Sends and receives are paired: with one receiving slot, a
// slow owner delays its senders. The slot is emptied during the next wgrad, and the last hop overlaps with the wgrad of
// the local shard. The first arrival overwrites the local gradient and the others are added, in a fixed order.
//
// With options().apart, every contribution arrives in a slot of its own, and one addition at the end of the pass reads
// and writes the local gradient once: 4 (R - 1) + 8 bytes of memory traffic for each float32 value, not 12 (R - 1).
class DirectGradients {
 public:
  explicit DirectGradients(Builder& builder) : builder_(builder) {}

  // Computes this rank's contribution to the gradient of shard r + s, 1 <= s <= R, and sends it to its owner. `weight`:
  // read by the wgrad of a bundle.
  void compute(int s, Buffer weight = kNoBuffer);
  // Copies or adds the last arrival, or all that arrive apart, to the local gradient. Call it once more after the
  // computes of a pass, for the last hop.
  void land();

 private:
  Buffer home() const { return {Channel::gradient, Buffer::kHome}; }
  Buffer leaving(int s) { return builder_.slot(Channel::gradient, (s - 1) % 2); }
  // After those that leave, so that a slot has the same number on all ranks, even if a rank needs only one to send.
  Buffer arriving(int s) {
    return builder_.slot(Channel::gradient, (builder_.ranks() > 2 ? 2 : 1) + (apart() ? s - 1 : 0));
  }
  bool apart() const { return builder_.options().apart; }

  Builder& builder_;
  bool started_ = false;  // whether the local tensor holds a sum
};

}  // namespace rtp
