// Failure notices between ranks of one host, without waiting for a timeout: each rank has a page of shared memory that
// the others poll. Ranks of other hosts are not covered.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transport/shm/shared_memory.h"

namespace rtp {

class PeerStatus {
 public:
  PeerStatus(int rank, int ranks);

  // Returns the address that the other ranks need for connect().
  std::string address() const;
  // `addresses`: one per rank. Returns the number of ranks whose memory can be mapped; the others are ignored.
  int connect(const std::vector<std::string>& addresses);

  // Publishes that this rank has failed. Only the first reason is kept.
  void report_failure(const std::string& reason) noexcept;
  // Returns which other rank has failed, and why.
  std::optional<std::string> failed_peer() const;
  // Returns the first of these ranks whose process has ended.
  std::optional<int> ended(const std::vector<int>& peers) const;

 private:
  struct Peer {
    SharedMemory page;
    ProcessWatch watch;
  };

  int rank_;
  int ranks_;
  SharedMemory own_;
  std::vector<Peer> peers_;  // by rank; no memory for an unreachable rank
};

}  // namespace rtp
