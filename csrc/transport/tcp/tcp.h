// CPUs of any hosts over sockets: a thread per channel and direction, which sends from and receives into the memory of
// the hop itself and wakes as rarely as the kernel lets it. Who connects has to know the token of the ring; what
// travels is not encrypted.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace rtp {

class TcpTransport : public Transport {
 public:
  // What a peer needs to connect to this rank; exchanged by the caller, in ring order.
  virtual std::string address() const = 0;
  // Connects to all peers. Throws RotationError naming the one that cannot be reached.
  virtual void connect(const std::vector<std::string>& addresses) = 0;
};

// `host`: the address of this host, in numbers, at which its peers find it.
std::shared_ptr<TcpTransport> make_tcp_transport(int rank, int ranks, const std::string& host,
                                                 std::chrono::milliseconds timeout);

}  // namespace rtp
