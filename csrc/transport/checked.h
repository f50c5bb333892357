// A transport whose hops carry a checksum, so that corrupted data raises an error. For CPUs.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rtp {

class CheckedTransport : public Transport {
 public:
  // For tests: flips one bit of hop `number` (from 0) that this rank receives on `channel`, after its arrival and
  // before the checksum is verified.
  virtual void flip(Channel channel, int64_t number) = 0;
};

// Wraps `inner`, a host transport in a ring of `ranks`. `verify`: false omits the checksums, for tests in which flipped
// bits must stay undetected.
std::shared_ptr<CheckedTransport> make_checked_transport(std::shared_ptr<Transport> inner, int ranks, bool verify);

}  // namespace rtp
