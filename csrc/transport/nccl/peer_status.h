// How ranks of one host learn of each other's failures without waiting for a timeout: each has a page of memory that
// the others look at. Ranks of other hosts are not heard.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transport/shm/shared_memory.h"

namespace rtp {

class PeerStatus {
 public:
  PeerStatus(int rank, int ranks);

  // What the other ranks need to look here.
  std::string address() const;
  // `addresses`: of all ranks. Ranks whose memory cannot be reached are not reachable; returns how many are.
  int connect(const std::vector<std::string>& addresses);

  // Tells the others that this rank has failed. Only the first reason counts.
  void report_failure(const std::string& reason) noexcept;
  // Which other rank has failed, and why.
  std::optional<std::string> failed_peer() const;
  // Which of these ranks is no longer a process.
  std::optional<int> ended(const std::vector<int>& peers) const;

 private:
  struct Peer {
    SharedMemory page;
    ProcessWatch watch;
  };

  int rank_;
  int ranks_;
  SharedMemory own_;
  std::vector<Peer> peers_;  // by rank; without memory where a rank is not heard
};

}  // namespace rtp
