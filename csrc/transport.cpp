#include "transport.h"

#include "checks.h"

namespace rtp {

std::string Hop::describe() const {
  return concat(operation, ", ", rtp::name(channel), " hop ", index + 1, " of ", count);
}

void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited, const std::string& cause) {
  throw RingTimeout(
      concat(hop.describe(), ": rank ", peer, " of the ring did not answer (waited ", waited.count(), " s): ", cause));
}

}  // namespace rtp
