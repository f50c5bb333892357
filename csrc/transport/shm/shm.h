// The CPUs of one host: slots live in shared memory, and a thread per channel copies a shard straight from where it is
// into the neighbour's slot. One copy per hop, no socket, no kernel call on the data path.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace rtp {

class ShmTransport : public Transport {
 public:
  // What a peer needs to find this rank's memory; exchanged by the caller, in ring order.
  virtual std::string address() const = 0;
  // Maps the peers' control blocks. Throws RotationError naming the peer that cannot be reached (another host,
  // container or user).
  virtual void connect(const std::vector<std::string>& addresses) = 0;
};

// `first`: what messages call rank 0, where these are a part of the ranks of a ring.
std::shared_ptr<ShmTransport> make_shm_transport(int rank, int ranks, std::chrono::milliseconds timeout, int first);

}  // namespace rtp
