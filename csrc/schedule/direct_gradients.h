// Gradients by direct reduction: every rank sends its contribution to the owner, without a travelling partial sum.
#pragma once

#include "schedule/builder.h"

namespace rtp {

// The gradients of a pass with gradient route direct, in any ring of two ranks or more.
//
// What this rank contributes to the gradient of shard r + s leaves for its owner as soon as it is computed, while what
// rank r - s contributes to the one at home arrives. Hops stay paired: there is one slot to receive in, so that a slow
// owner holds up those who send to it. It is emptied under the next wgrad, and the last hop hides under that of the
// shard at home: home is written by what arrived first, and then added to, in an order that is always the same.
class DirectGradients {
 public:
  explicit DirectGradients(Builder& builder) : builder_(builder) {}

  // Computes this rank's part of the gradient of shard r + s, 1 <= s <= R, and sends it to its owner. `weight`: what
  // the wgrad of a bundle reads.
  void compute(int s, Buffer weight = kNoBuffer);
  // Brings home what arrived last. After the computes of a pass once more, for the last hop.
  void land();

 private:
  Buffer home() const { return {Channel::gradient, Buffer::kHome}; }
  Buffer leaving(int s) { return builder_.slot(Channel::gradient, (s - 1) % 2); }
  // The last slot, so that it has one number on all ranks, also where one slot is enough to send.
  Buffer arriving() { return builder_.slot(Channel::gradient, builder_.ranks() > 2 ? 2 : 1); }

  Builder& builder_;
  bool started_ = false;  // whether the local tensor holds a sum yet
};

}  // namespace rtp
