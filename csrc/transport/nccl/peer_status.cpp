#include "transport/nccl/peer_status.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/checks.h"

namespace rtp {
namespace {

// The contents of a rank's page; fresh memory is zero.
struct Page {
  uint64_t number;
  std::atomic<uint32_t> failed;
  char reason[1000];
};

Page& page(const SharedMemory& memory) { return *reinterpret_cast<Page*>(memory.data()); }

}  // namespace

PeerStatus::PeerStatus(int rank, int ranks) : rank_(rank), ranks_(ranks), own_(SharedMemory::numbered(sizeof(Page))) {}

std::string PeerStatus::address() const { return MemoryAddress(own_).text(); }

int PeerStatus::connect(const std::vector<std::string>& addresses) {
  RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "peer status: expected ", ranks_, " addresses, got ",
                  addresses.size());
  peers_ = std::vector<Peer>(addresses.size());
  int reachable = 0;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) continue;
    try {
      SharedMemory memory = map_numbered(addresses[peer], sizeof(Page), /*writable=*/true, "peer status");
      peers_[peer] = Peer{std::move(memory), ProcessWatch(MemoryAddress(addresses[peer]).pid)};
      ++reachable;
    } catch (const MemoryError&) {  // no address, out of reach, or another user: failures of this rank are detected by
                                    // the timeout
    }
  }
  return reachable;
}

void PeerStatus::report_failure(const std::string& reason) noexcept {
  Page& mine = page(own_);
  if (mine.failed.load(std::memory_order_acquire) != 0) return;
  const size_t length = std::min(reason.size(), sizeof(mine.reason) - 1);
  std::memcpy(mine.reason, reason.data(), length);
  mine.reason[length] = '\0';
  mine.failed.store(1, std::memory_order_release);
}

std::optional<std::string> PeerStatus::failed_peer() const {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const SharedMemory& memory = peers_[peer].page;
    if (memory.data() == nullptr || page(memory).failed.load(std::memory_order_acquire) == 0) continue;
    const char* reason = page(memory).reason;
    return concat("rank ", peer,
                  " of the ring has failed: ", std::string(reason, strnlen(reason, sizeof(Page::reason))));
  }
  return std::nullopt;
}

std::optional<int> PeerStatus::ended(const std::vector<int>& peers) const {
  for (const int peer : peers) {
    if (peer < static_cast<int>(peers_.size()) && peers_[peer].watch.ended()) return peer;
  }
  return std::nullopt;
}

}  // namespace rtp
