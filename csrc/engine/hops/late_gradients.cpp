#include "engine/hops/late_gradients.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/checks.h"
#include "base/ranges.h"
#include "engine/hops/gradient_quantizer.h"

namespace rtp {

void LateGradients::finish(const at::Tensor& tensor) {
  const auto found = std::find_if(late_.begin(), late_.end(), [&](const LateGradient& gradient) {
    return std::any_of(gradient.local.begin(), gradient.local.end(),
                       [&](const at::Tensor& local) { return local.is_alias_of(tensor); });
  });
  if (found != late_.end()) finish_all_but(static_cast<size_t>(late_.end() - found) - 1);
  transport_->streams().order_compute_after(finished_last_);
}

void LateGradients::finish_all_but(size_t most) {
  while (late_.size() > most) finish_next();
}

// The gradient stays in the list until it has finished: if its hop fails, the target memory must outlive the abort of
// the transport.
void LateGradients::finish_next() {
  LateGradient& gradient = late_.front();
  Streams& streams = transport_->streams();
  const EventHandle waiting =
      sink_.begin(gradient.traced, TraceKind::wait, gradient.position, Lane::compute, "wait: " + label(gradient.step));
  Range range([&] { return concat("wait: ", label(gradient.step)); });
  for (const auto& slot : gradient.slots) slot->usage.wait_for_all(streams);
  for (Usage& usage : gradient.uses) usage.wait_for_all(streams);
  streams.order_compute_after(finished_last_);
  range.end();
  sink_.end(waiting);
  const EventHandle adding = sink_.begin(gradient.traced, gradient.position, gradient.step);
  dequantize_into(streams, gradient.local, gradient.arriving, gradient.step.action == Action::add);
  sink_.end(adding);
  finished_last_ = streams.record_compute();
  for (const at::Tensor& local : gradient.local) {
    if (local.is_cuda())
      local.record_stream(c10::impl::VirtualGuardImpl(local.device().type()).getStream(local.device()));
  }
  for (const auto& slot : gradient.slots) {
    slot->usage.record_read(finished_last_);
    pool_.give_back(Channel::gradient, slot);
  }
  late_.pop_front();
  ++finished_;
}

}  // namespace rtp
