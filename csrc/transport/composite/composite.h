// Combines two transports: one for hops inside a host, one for hops between hosts.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace rtp {

class CompositeTransport : public Transport {
 public:
  using Transport::Transport;
  // Returns the bytes that this rank has sent to other hosts.
  virtual int64_t bytes_between_hosts(Channel channel) const = 0;
  virtual Transport& inner() const = 0;
};

// For rank `rank` of a ring in which groups of `per_host` consecutive ranks share a host. `inner` connects the ranks of
// this host, numbered by place; `outer` connects the whole ring. Slots come from `inner`. On a GPU both share the
// streams of the computes, and each has its own for its hops, so that hops between hosts do not wait for those inside.
// A hop of a flat route between a neighbour on this host and one on another is split in two, a receive and a send,
// unless hops of `inner` are joint: then `outer` makes all hops of flat routes. An end of one transport ends the other.
std::shared_ptr<CompositeTransport> make_composite_transport(std::shared_ptr<Transport> inner,
                                                             std::shared_ptr<Transport> outer, int rank, int per_host);

}  // namespace rtp
