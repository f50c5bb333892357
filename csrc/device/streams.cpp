#include "device/streams.h"

#include "base/checks.h"

namespace rtp {

Moment host_moment(HostClock::time_point time) { return std::make_shared<HostClock::time_point>(time); }

double Streams::seconds(const Moment& from, const Moment& to) {
  const auto time = [](const Moment& moment) { return *std::static_pointer_cast<HostClock::time_point>(moment); };
  return std::chrono::duration<double>(time(to) - time(from)).count();
}

void Streams::begin_graph_stream(bool) { RTP_ASSERT(false, "these streams do not support graphs"); }

}  // namespace rtp
