#include "schedule/direct_gradients.h"

namespace rtp {

void DirectGradients::compute(int s, Buffer weight) {
  const bool last = s == builder_.ranks();
  builder_.compute(Compute::wgrad, builder_.at(s), weight, last && started_ ? home() : kNoBuffer,
                   last ? home() : leaving(s));
  if (last) {
    started_ = true;
    return;
  }
  if (s > 1 && !apart()) land();
  builder_.hop(Channel::gradient, builder_.at(s), builder_.at(-s), builder_.at(s), builder_.at(0), leaving(s),
               arriving(s));
}

void DirectGradients::land() {
  // Runs on the stream of the wgrads, so that no dgrad waits for a hop.
  const int lane = builder_.options().two_lanes ? 1 : 0;
  builder_.local(started_ ? Action::add : Action::copy, Channel::gradient, builder_.at(0), arriving(1), home(), lane,
                 apart() ? builder_.ranks() - 1 : 1);
  started_ = true;
}

}  // namespace rtp
