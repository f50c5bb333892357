// A transport whose hops carry a checksum, so that what arrives changed is an error. For CPUs.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rtp {

class CheckedTransport : public Transport {
 public:
  // For tests: one bit of the hop of `channel` that this rank receives as its `number`th (from 0) is flipped after it
  // has arrived and before anybody looks at it.
  virtual void flip(Channel channel, int64_t number) = 0;
};

// Hops of `inner`, a transport of the host in a ring of `ranks`. `verify`: false leaves checksums out, for tests that
// flip bits without being noticed.
std::shared_ptr<CheckedTransport> make_checked_transport(std::shared_ptr<Transport> inner, int ranks, bool verify);

}  // namespace rtp
