#include "transport.h"

#include <functional>

#include "checks.h"

namespace rtp {

std::string Hop::describe() const {
  return concat(operation, ", ", rtp::name(channel), " hop ", index + 1, " of ", count);
}

uint64_t Hop::identity() const {
  return std::hash<std::string>{}(operation) * 1024 + static_cast<uint64_t>(index) * 2 + static_cast<uint64_t>(channel);
}

void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited, const std::string& cause) {
  throw RingTimeout(
      concat(hop.describe(), ": rank ", peer, " of the ring did not answer (waited ", waited.count(), " s): ", cause));
}

}  // namespace rtp
