#include "engine/hops/deferred_reductions.h"

#include <algorithm>

#include "base/checks.h"
#include "base/ranges.h"
#include "engine/hops/gradient_quantizer.h"

namespace rtp {

void DeferredReductions::finish(const at::Tensor& gradient) {
  const auto found = std::find_if(deferred_.begin(), deferred_.end(), [&](const DeferredReduction& reduction) {
    return std::any_of(reduction.local.begin(), reduction.local.end(),
                       [&](const at::Tensor& local) { return local.is_alias_of(gradient); });
  });
  if (found != deferred_.end()) finish_all_but(static_cast<size_t>(deferred_.end() - found) - 1);
}

void DeferredReductions::finish_all_but(size_t most) {
  while (deferred_.size() > most) finish_next();
}

// The reduction stays in the list until it has finished: if its hop fails, the target memory must outlive the abort of
// the transport.
void DeferredReductions::finish_next() {
  const DeferredReduction& reduction = deferred_.front();
  Streams& streams = transport_->streams();
  const EventHandle waiting = sink_.begin(reduction.traced, TraceKind::wait, reduction.position, Lane::compute,
                                          "wait: " + label(reduction.step));
  Range range([&] { return concat("wait: ", label(reduction.step)); });
  for (const auto& slot : reduction.slots) slot->usage.wait_for_all(streams);
  range.end();
  sink_.end(waiting);
  const EventHandle adding = sink_.begin(reduction.traced, reduction.position, reduction.step);
  dequantize_into(streams, reduction.local, reduction.arriving, true);
  sink_.end(adding);
  for (const auto& slot : reduction.slots) {
    slot->usage.record_read(streams.record_compute());
    pool_.give_back(Channel::gradient, slot);
  }
  deferred_.pop_front();
  ++finished_;
}

}  // namespace rtp
