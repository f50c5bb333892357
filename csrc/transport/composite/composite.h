// Two transports as one: what stays on a host goes one way, what leaves it the other.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rtp {

class CompositeTransport : public Transport {
 public:
  // What this rank has sent to other hosts.
  virtual int64_t bytes_between_hosts(Channel channel) const = 0;
};

// For rank `rank` of a ring of which each `per_host` neighbours share a host. `inner` joins the ranks of this host,
// which it numbers by place; `outer` those of the whole ring. Slots are the inner one's. Both run hops beside the
// host's own lanes, and either takes the other down with it.
std::shared_ptr<CompositeTransport> make_composite_transport(std::shared_ptr<Transport> inner,
                                                             std::shared_ptr<Transport> outer, int rank, int per_host);

}  // namespace rtp
