// A transport for CPUs of any hosts over sockets: one thread per channel and direction, which sends from and receives
// into the memory of the hop and wakes as rarely as the kernel permits. A connecting peer must present the token of the
// ring; the data is not encrypted.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace rtp {

class TcpTransport : public Transport {
 public:
  // Returns the address that a peer needs to connect to this rank; the caller exchanges the addresses, in ring order.
  virtual std::string address() const = 0;
  // Connects to all peers. Throws RotationError that names an unreachable peer.
  virtual void connect(const std::vector<std::string>& addresses) = 0;
};

// `host`: the numeric address of this host at which its peers reach it.
std::shared_ptr<TcpTransport> make_tcp_transport(int rank, int ranks, const std::string& host,
                                                 std::chrono::milliseconds timeout);

}  // namespace rtp
