#include "transport/shm/shm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "base/checks.h"
#include "transport/shm/mailbox.h"
#include "transport/shm/shared_memory.h"

namespace rtp {
namespace {

constexpr int kSpins = 2000;            // polls of a flag before sleeping: a few microseconds
constexpr size_t kMappingsPerPeer = 6;  // mapped slots per peer and channel
constexpr auto kProcessCheckInterval =
    std::chrono::milliseconds(100);  // interval at which a waiting thread checks that its peers are alive

// A slot of this rank, with the id that its peers use.
struct Segment {
  uint64_t id;
  SharedMemory memory;
};

class HostTransport : public ShmTransport, public std::enable_shared_from_this<HostTransport> {
 public:
  HostTransport(int rank, int ranks, std::chrono::milliseconds timeout, int first)
      : rank_(rank),
        ranks_(ranks),
        first_(first),
        timeout_(timeout),
        own_(Control::bytes(ranks)),
        received_(2 * ranks),
        sent_(2 * ranks) {
    std::random_device random;
    control().nonce = (static_cast<uint64_t>(random()) << 32) | random();
  }

  ~HostTransport() override { abort("dropped"); }

  const char* name() const override { return "shm"; }
  bool receives_anywhere() const override { return false; }
  size_t most_tensors() const override { return kMaxTensors; }

  std::string address() const override {
    return MemoryAddress(own_, reinterpret_cast<Control*>(own_.data())->nonce).text();
  }

  void connect(const std::vector<std::string>& addresses) override {
    RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "transport shm: expected ", ranks_,
                    " addresses, got ", addresses.size());
    for (int peer = 0; peer < ranks_; ++peer) {
      const auto named = [&](const auto&... what) { return concat("transport shm: rank ", first_ + peer, what...); };
      try {
        const MemoryAddress address(addresses[peer]);
        if (const auto where = address.out_of_reach()) throw RotationError(named(" is ", *where));
        const int pid = address.pid;
        peers_.push_back(Peer{SharedMemory(pid, address.fd, Control::bytes(ranks_)), ProcessWatch(pid), pid, {}});
        if (control(peer).nonce != address.nonce) throw RotationError(named(" is not process ", pid));
      } catch (const MemoryError& error) {
        throw RotationError(named(": ", error.what()));
      }
    }
    control().state = RingState::alive;
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      senders_[static_cast<size_t>(channel)] = std::thread([this, channel] { serve(channel); });
    }
  }

  std::unique_ptr<Transfer> post(const Hop& hop) override;
  at::Tensor allocate(Channel, int64_t bytes) override;

  void abort(const std::string& reason) noexcept override { end(RingState::failed, reason); }
  void close() override { end(RingState::closed, "it was closed"); }

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

  // Waits on a `bell` of this rank until `ready`. Throws RingTimeout if the timeout expires or a rank of the ring is
  // lost.
  template <typename Ready>
  void wait_until(const Hop& hop, int peer, Bell& bell, Ready ready) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (ready()) return;
    }
    const auto start = Clock::now();
    auto next_check = start;  // time of the next check of the peer's process, whose end rings no bell
    while (true) {
      const uint32_t seen = bell.value();
      if (ready()) return;
      const auto now = Clock::now();
      const auto waited = now - start;
      if (control().state != RingState::alive) throw_end(hop);
      const bool look = now >= next_check;
      if (look) next_check = now + kProcessCheckInterval;
      if (const auto lost = lost_rank(peer, look); lost && !ready())
        throw_timeout(hop, first_ + lost->rank, waited, lost->reason);
      if (waited > timeout_) throw_timeout(hop, first_ + peer, waited, "timeout");
      bell.sleep(seen, std::min<std::chrono::nanoseconds>(next_check - now, timeout_ - waited));
    }
  }

  struct Lost {
    int rank;
    const char* reason;
  };

  // Returns a rank whose loss ends the ring: one that failed, or the awaited one if it has ended. Other ranks may have
  // exited in good order; if they died, a rank that waits for them fails and sets its state. `look`: also checks the
  // process.
  std::optional<Lost> lost_rank(int awaited, bool look) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (control(peer).state == RingState::failed) return Lost{peer, "its ring failed"};
    }
    if (control(awaited).state == RingState::closed) return Lost{awaited, "it closed its ring"};
    if (look && awaited != rank_ && peers_[awaited].watch.ended()) return Lost{awaited, "its process has ended"};
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
  const SharedMemory& map_landing(const Hop& hop, const Landing& landing);
  void end(RingState state, const std::string& reason) noexcept;

  const int rank_;
  const int ranks_;
  const int first_;  // ring rank of rank 0
  const std::chrono::milliseconds timeout_;
  SharedMemory own_;
  std::vector<Peer> peers_;
  std::vector<uint32_t> received_;  // messages posted, by channel and peer
  std::vector<uint32_t> sent_;
  uint64_t next_segment_ = 1;
  std::mutex segments_mutex_;
  std::map<std::byte*, std::shared_ptr<Segment>> segments_;

  std::mutex mutex_;  // guards the queues, their progress and the end
  std::array<std::condition_variable, 2> wake_;
  std::array<std::deque<Job>, 2> queue_;
  std::array<std::atomic<uint64_t>, 2> queued_{};
  std::array<std::atomic<uint64_t>, 2> delivered_{};
  bool stopping_ = false;
  std::string reason_;
  std::exception_ptr failure_;  // error of a sender thread
  std::array<std::thread, 2> senders_;
};

class HostTransfer : public Transfer {
 public:
  HostTransfer(std::shared_ptr<HostTransport> transport, const Hop& hop)
      : transport_(std::move(transport)), hop_(hop) {}

  void expect(uint32_t sequence) { receive_ = sequence; }
  void expect_nothing() { arrived_ = Clock::now().time_since_epoch().count(); }
  void sends(uint64_t job) { send_ = job; }

  void wait_received() override {
    if (!receive_) return;
    Mailbox& inbox = transport_->inbox(hop_.channel, hop_.from);
    transport_->wait_until(hop_, hop_.from, transport_->control().of_callers(), [&] {
      return static_cast<int32_t>(inbox.done.load(std::memory_order_acquire) - *receive_) >= 0;
    });
    // Skipped if the mailbox entry has been reused since.
    if (transport_->received_[transport_->mailbox_index(hop_.channel, hop_.from)] - *receive_ < kDepth) {
      arrived_ = inbox.arrived[*receive_ % kDepth].load(std::memory_order_relaxed);
    }
    receive_.reset();
  }

  Moment arrived() const override {
    return arrived_ ? host_moment(Clock::time_point(Clock::duration(*arrived_))) : nullptr;
  }

  void wait_sent() override {
    if (!send_) return;
    const auto& delivered = transport_->delivered_[static_cast<size_t>(hop_.channel)];
    transport_->wait_until(hop_, hop_.to, transport_->control().of_callers(),
                           [&] { return delivered.load(std::memory_order_acquire) >= *send_; });
    send_.reset();
  }

 private:
  std::shared_ptr<HostTransport> transport_;
  Hop hop_;
  std::optional<uint32_t> receive_;
  std::optional<uint64_t> send_;
  std::optional<Clock::rep> arrived_;
};

size_t total(const std::vector<Span>& spans) {
  size_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

std::unique_ptr<Transfer> HostTransport::post(const Hop& hop) {
  const size_t channel = static_cast<size_t>(hop.channel);
  RTP_ASSERT(hop.receive.size() <= kMaxTensors && hop.send.size() <= kMaxTensors, hop.describe(),
             " has too many parts");
  auto transfer = std::make_unique<HostTransfer>(shared_from_this(), hop);
  if (const size_t bytes = total(hop.receive); bytes > 0) {
    Mailbox& inbox = this->inbox(hop.channel, hop.from);
    const uint32_t sequence = ++received_[mailbox_index(hop.channel, hop.from)];
    RTP_ASSERT(sequence - inbox.done.load() <= kDepth, hop.describe(), " outruns its mailbox");
    Landing& landing = inbox.landing[sequence % kDepth];
    const auto filled =
        std::find_if(hop.receive.begin(), hop.receive.end(), [](const Span& part) { return part.bytes > 0; });
    const auto segment = find_segment(filled->data);
    RTP_ASSERT(segment != nullptr, hop.describe(), " must land in a slot");
    landing.fd = segment->memory.fd();
    landing.segment = segment->id;
    landing.identity = hop.identity();
    landing.segment_bytes = segment->memory.bytes();
    landing.parts = static_cast<uint32_t>(hop.receive.size());
    for (size_t index = 0; index < hop.receive.size(); ++index) {
      const Span& span = hop.receive[index];
      landing.offset[index] = span.bytes == 0 ? 0 : static_cast<uint64_t>(span.data - segment->memory.data());
      landing.bytes[index] = span.bytes;
    }
    inbox.posted.store(sequence, std::memory_order_release);
    control(hop.from).of_sender(hop.channel).ring();
    transfer->expect(sequence);
  } else {
    transfer->expect_nothing();
  }
  if (total(hop.send) > 0) {
    if (control().state != RingState::alive) throw_end(hop);
    {
      const std::lock_guard lock(mutex_);
      queue_[channel].push_back({hop, ++sent_[mailbox_index(hop.channel, hop.to)]});
      transfer->sends(++queued_[channel]);
    }
    wake_[channel].notify_one();
  }
  return transfer;
}

at::Tensor HostTransport::allocate(Channel, int64_t bytes) {
  const auto segment = std::make_shared<Segment>(
      Segment{next_segment_++, SharedMemory(std::max<size_t>(static_cast<size_t>(bytes), 1))});
  std::byte* data = segment->memory.data();
  {
    const std::lock_guard lock(segments_mutex_);
    segments_[data] = segment;
  }
  const auto release = [transport = weak_from_this(), segment, data](void*) {
    if (const auto self = transport.lock()) {
      const std::lock_guard lock(self->segments_mutex_);
      self->segments_.erase(data);
    }
  };
  return at::from_blob(data, {bytes}, release, at::kByte);
}

// The sender thread of one channel: delivers in the order of posting.
void HostTransport::serve(Channel channel) {
  auto& queue = queue_[static_cast<size_t>(channel)];
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_[static_cast<size_t>(channel)].wait(lock, [&] { return stopping_ || !queue.empty(); });
      if (stopping_) return;
      job = std::move(queue.front());
      queue.pop_front();
    }
    try {
      deliver(job);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      control().state = RingState::failed;
      for (int peer = 0; peer < ranks_; ++peer) control(peer).ring_all();
      return;
    }
    control().of_callers().ring();
  }
}

void HostTransport::deliver(const Job& job) {
  const Hop& hop = job.hop;
  Mailbox& outbox = this->outbox(hop.channel, hop.to);
  wait_until(hop, hop.to, control().of_sender(hop.channel),
             [&] { return static_cast<int32_t>(outbox.posted.load(std::memory_order_acquire) - job.sequence) >= 0; });
  // Copied before it is checked, because the peer can overwrite it at any time.
  const Landing landing = outbox.landing[job.sequence % kDepth];
  if (landing.identity != hop.identity()) {
    throw RotationError(concat(hop.describe(), ": the ranks of the ring are out of step: rank ", first_ + hop.to,
                               " expects another operation or hop"));
  }
  if (landing.parts != hop.send.size()) {
    throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ", landing.parts,
                               " tensors, got ", hop.send.size()));
  }
  for (size_t index = 0; index < hop.send.size(); ++index) {
    if (landing.bytes[index] != hop.send[index].bytes) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ",
                                 landing.bytes[index], " bytes, got ", hop.send[index].bytes));
    }
  }
  const SharedMemory& target = map_landing(hop, landing);
  for (size_t index = 0; index < hop.send.size(); ++index) {
    const uint64_t offset = landing.offset[index], bytes = hop.send[index].bytes;
    if (bytes > target.bytes() || offset > target.bytes() - bytes) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ", bytes,
                                 " bytes at offset ", offset, " of a segment that holds ", target.bytes(), " bytes"));
    }
  }
  for (size_t index = 0; index < hop.send.size(); ++index) {
    if (hop.send[index].bytes == 0) continue;
    std::memcpy(target.data() + landing.offset[index], hop.send[index].data, hop.send[index].bytes);
  }
  // Updates the local count first: once `done` is set, the peer may finish and close before this thread continues.
  ++delivered_[static_cast<size_t>(hop.channel)];
  outbox.arrived[job.sequence % kDepth].store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  outbox.done.store(job.sequence, std::memory_order_release);
  control(hop.to).of_callers().ring();
}

// Returns the mapped segment of the receiver that a hop targets.
const SharedMemory& HostTransport::map_landing(const Hop& hop, const Landing& landing) {
  Peer& peer = peers_[hop.to];
  auto& mapped = peer.mapped[static_cast<size_t>(hop.channel)];
  const auto known =
      std::find_if(mapped.begin(), mapped.end(), [&](const Segment& s) { return s.id == landing.segment; });
  if (known != mapped.end()) {
    mapped.splice(mapped.begin(), mapped, known);
  } else {
    try {
      mapped.push_front({landing.segment, SharedMemory(peer.pid, landing.fd, landing.segment_bytes)});
    } catch (const MemoryError& error) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring: ", error.what()));
    }
    if (mapped.size() > kMappingsPerPeer) mapped.pop_back();
  }
  return mapped.front().memory;
}

void HostTransport::end(RingState state, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    reason_ = reason;
  }
  RingState alive = RingState::alive;
  control().state.compare_exchange_strong(alive, state);
  if (alive == RingState::starting) control().state = state;
  for (auto& wake : wake_) wake.notify_all();
  for (size_t peer = 0; peer < peers_.size(); ++peer) control(static_cast<int>(peer)).ring_all();
  control().ring_all();
  for (std::thread& sender : senders_) {
    if (sender.joinable()) sender.join();
  }
}

}  // namespace

std::shared_ptr<ShmTransport> make_shm_transport(int rank, int ranks, std::chrono::milliseconds timeout, int first) {
  return make_owned<HostTransport>(rank, ranks, timeout, first);
}

}  // namespace rtp
