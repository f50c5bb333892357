// Combines two transports: one for hops inside a host, one for hops between hosts.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rtp {

class CompositeTransport : public Transport {
 public:
  // Returns the bytes that this rank has sent to other hosts.
  virtual int64_t bytes_between_hosts(Channel channel) const = 0;
};

// For rank `rank` of a ring in which groups of `per_host` consecutive ranks share a host. `inner` connects the ranks of
// this host, numbered by place; `outer` connects the whole ring. Slots come from `inner`. Both transports run on the
// host's streams, and an end of one ends the other.
std::shared_ptr<CompositeTransport> make_composite_transport(std::shared_ptr<Transport> inner,
                                                             std::shared_ptr<Transport> outer, int rank, int per_host);

}  // namespace rtp
