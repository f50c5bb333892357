#include "engine/hops/landings.h"

#include <algorithm>

#include "base/checks.h"
#include "base/ranges.h"
#include "engine/hops/narrowing.h"

namespace rtp {

void Landings::land(const at::Tensor& gradient) {
  const auto found = std::find_if(landings_.begin(), landings_.end(), [&](const Landing& landing) {
    return std::any_of(landing.home.begin(), landing.home.end(),
                       [&](const at::Tensor& home) { return home.is_alias_of(gradient); });
  });
  if (found != landings_.end()) land_all_but(static_cast<size_t>(landings_.end() - found) - 1);
}

void Landings::land_all_but(size_t most) {
  while (landings_.size() > most) land_next();
}

// It stays the first of the list until it has landed: where its hop fails, the memory that the hop fills must outlive
// the transport's giving up.
void Landings::land_next() {
  const Landing& landing = landings_.front();
  Lanes& lanes = transport_->lanes();
  const EventHandle waiting =
      trace_.begin(landing.traced, TraceKind::wait, landing.position, Lane::compute, "wait: " + label(landing.step));
  Range range([&] { return concat("wait: ", label(landing.step)); });
  for (const auto& slot : landing.slots) slot->usage.settle(lanes);
  range.end();
  trace_.end(waiting);
  const EventHandle adding = trace_.begin(landing.traced, landing.position, landing.step);
  bring(lanes, landing.home, landing.arriving, true);
  trace_.end(adding);
  for (const auto& slot : landing.slots) {
    slot->usage.enter_read(lanes.mark_compute());
    pool_.give_back(Channel::gradient, slot);
  }
  landings_.pop_front();
  ++landed_;
}

}  // namespace rtp
