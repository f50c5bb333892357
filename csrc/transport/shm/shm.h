// A transport for the CPUs of one host: slots are in shared memory, and one thread per channel copies a shard directly
// from its memory into the neighbour's slot. One copy per hop, no socket, no system call on the data path.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace rtp {

class ShmTransport : public Transport {
 public:
  // Returns the address of this rank's memory; the caller exchanges the addresses, in ring order.
  virtual std::string address() const = 0;
  // Maps the peers' control blocks. Throws RotationError that names an unreachable peer (another host, container or
  // user).
  virtual void connect(const std::vector<std::string>& addresses) = 0;
};

// `first`: the ring rank of rank 0 in messages, if these ranks are a part of a ring.
std::shared_ptr<ShmTransport> make_shm_transport(int rank, int ranks, std::chrono::milliseconds timeout, int first);

}  // namespace rtp
