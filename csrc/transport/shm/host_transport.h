// The transport between ranks of one host: hops are copied into the memory of the receiver.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/checks.h"
#include "base/signals.h"
#include "base/threads.h"
#include "transport/shm/mailbox.h"
#include "transport/shm/polling.h"
#include "transport/shm/shared_memory.h"
#include "transport/shm/shm.h"

namespace rtp {

inline constexpr size_t kCallers = 2;  // number of the bell of callers

inline size_t total(const std::vector<Span>& spans) {
  size_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

// Whether a message travels as a SmallMessage; both ends know its size.
inline bool small(const std::vector<Span>& spans) { return total(spans) <= size_t{kMostSmall}; }

// A slot of this rank, with the id that its peers use.
struct Segment {
  uint64_t id;
  SharedMemory memory;
};

// Interval at which a waiting thread checks that its peers are alive.
inline constexpr auto kProcessCheckInterval = kSignalInterval;

class HostTransfer;

class HostTransport : public ShmTransport, public std::enable_shared_from_this<HostTransport> {
 public:
  HostTransport(int rank, int ranks, std::chrono::milliseconds timeout, int first)
      : rank_(rank),
        ranks_(ranks),
        first_(first),
        timeout_(timeout),
        own_(SharedMemory::numbered(Control::bytes(ranks))),
        received_(2 * ranks),
        receives_(2 * ranks),
        sent_(2 * ranks) {}

  ~HostTransport() override { abort("dropped"); }

  const char* name() const override { return "shm"; }
  bool receives_anywhere() const override { return false; }
  size_t most_tensors() const override { return kMaxTensors; }

  std::string address() const override { return MemoryAddress(own_).text(); }

  void connect(const std::vector<std::string>& addresses) override {
    RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "transport shm: expected ", ranks_,
                    " addresses, got ", addresses.size());
    for (int peer = 0; peer < ranks_; ++peer) {
      SharedMemory memory = map_numbered(addresses[peer], Control::bytes(ranks_), /*writable=*/true,
                                         concat("transport shm: rank ", first_ + peer));
      const int pid = MemoryAddress(addresses[peer]).pid;
      peers_.push_back(Peer{std::move(memory), ProcessWatch(pid), pid, {}});
    }
    control().state = PeerState::present;
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      senders_[static_cast<size_t>(channel)] = start_thread([this, channel] { serve(channel); });
    }
  }

  std::unique_ptr<Transfer> post(const Hop& hop) override;
  at::Tensor allocate(Channel, int64_t bytes) override;

  void abort(const std::string& reason) noexcept override { end(PeerState::failed, reason); }
  void close() override { end(PeerState::closed, "it was closed"); }

 private:
  friend class HostTransfer;

  struct Peer {
    SharedMemory control;
    ProcessWatch watch;
    int pid;
    std::array<std::list<Segment>, 2> mapped;  // most recently used first
  };
  struct Job {
    Hop hop;
    uint32_t sequence;
  };

  Control& control() { return *reinterpret_cast<Control*>(own_.data()); }
  Control& control(int peer) { return *reinterpret_cast<Control*>(peers_[peer].control.data()); }
  Mailbox& inbox(Channel channel, int from) { return control().mailbox(channel, from, ranks_); }
  Mailbox& outbox(Channel channel, int to) { return control(to).mailbox(channel, rank_, ranks_); }
  size_t mailbox_index(Channel channel, int peer) const { return static_cast<size_t>(channel) * ranks_ + peer; }

  // Waits until `ready`, which a ring of a bell of this rank follows: the bell of a sender, or `kCallers`. Throws
  // RingTimeout if the timeout expires or a rank of the ring is lost.
  template <typename Ready>
  void wait_until(const Hop& hop, int peer, size_t number, Ready ready) {
    if (ready()) return;
    const auto start = Clock::now();
    Polling& polling = polling_[number];
    auto waited = Clock::duration::zero();
    bool done = false;
    while (!done && waited < polling.time()) {
      for (int poll = 0; poll < 32 && !done; ++poll) {
        pause_core();
        done = ready();
      }
      waited = Clock::now() - start;
    }
    if (!done) sleep_until(hop, peer, control().bells[number], start, ready);
    polling.add(Clock::now() - start);
  }

  template <typename Ready>
  void sleep_until(const Hop& hop, int peer, Bell& bell, Clock::time_point start, Ready ready) {
    auto next_check = start;  // time of the next check of the peer's process, whose end rings no bell
    while (true) {
      const uint32_t seen = bell.value();
      if (ready()) return;
      const auto now = Clock::now();
      const auto waited = now - start;
      if (control().state != PeerState::present) throw_end(hop);
      const bool look = now >= next_check;
      if (look) next_check = now + kProcessCheckInterval;
      if (look && now > start + kSignalInterval) check_signals();
      if (const auto lost = lost_rank(peer, look); lost && !ready())
        throw_timeout(hop, first_ + lost->rank, waited, lost->reason);
      if (waited > timeout_) throw_timeout(hop, first_ + peer, waited, "timeout");
      bell.sleep(seen, std::min<std::chrono::nanoseconds>(next_check - now, timeout_ - waited));
    }
  }

  // Returns a rank whose loss ends the ring: one that failed, or the awaited one if it has ended. Other ranks may have
  // exited in good order; if they died, a rank that waits for them fails and sets its state. `look`: also checks the
  // process.
  std::optional<Lost> lost_rank(int awaited, bool look) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (control(peer).state == PeerState::failed) return Lost{peer, why_lost(PeerState::failed)};
    }
    if (control(awaited).state == PeerState::closed) return Lost{awaited, why_lost(PeerState::closed)};
    if (look && awaited != rank_ && peers_[awaited].watch.ended()) return Lost{awaited, why_lost(PeerState::gone)};
    return std::nullopt;
  }

  // Throws the reason why this rank's ring has ended: the error of a sender, or that the ring was closed or aborted.
  [[noreturn]] void throw_end(const Hop& hop) {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    throw RotationError(concat(hop.describe(), ": the ring cannot be used any more: ", reason_));
  }

  std::shared_ptr<Segment> find_segment(const std::byte* address) {
    const std::lock_guard lock(segments_mutex_);
    for (const auto& [base, segment] : segments_) {
      if (segment->memory.contains(address)) return segment;
    }
    return nullptr;
  }

  void serve(Channel channel);
  void deliver(const Job& job);
  void deliver_small(const Hop& hop, uint32_t sequence);
  void take(const Hop& hop, uint32_t sequence);
  void complete(const Hop& hop, uint32_t sequence);
  const SharedMemory& map_landing(const Hop& hop, const Landing& landing);
  void end(PeerState state, const std::string& reason) noexcept;

  const int rank_;
  const int ranks_;
  const int first_;  // ring rank of rank 0
  const std::chrono::milliseconds timeout_;
  SharedMemory own_;
  std::vector<Peer> peers_;
  std::vector<uint32_t> received_;                           // messages posted, by channel and peer
  std::vector<std::array<HostTransfer*, kDepth>> receives_;  // those not taken yet, by mailbox and entry
  std::vector<uint32_t> sent_;
  uint64_t next_segment_ = 1;
  std::mutex segments_mutex_;
  std::map<std::byte*, std::shared_ptr<Segment>> segments_;

  std::mutex mutex_;  // guards the queues, their progress and the end
  std::array<std::condition_variable, 2> wake_;
  std::array<std::deque<Job>, 2> queue_;
  std::array<std::atomic<uint64_t>, 2> queued_{};     // messages posted, by channel
  std::array<std::atomic<uint64_t>, 2> delivered_{};  // those that no longer read their source
  std::array<std::atomic<uint64_t>, 2> completed_{};  // messages announced to the receiver
  bool stopping_ = false;
  std::string reason_;
  std::exception_ptr failure_;  // error of a sender thread
  std::array<std::thread, 2> senders_;
  std::array<Polling, 3> polling_;  // by bell
};

}  // namespace rtp
