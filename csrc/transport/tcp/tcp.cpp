#include "transport/tcp/tcp.h"

#include <ATen/ops/empty.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "base/checks.h"
#include "base/signals.h"
#include "base/threads.h"
#include "transport/tcp/peers.h"

namespace rtp {
namespace {

using Clock = HostClock;

constexpr size_t kMaxTensors = 12;  // maximum per hop
constexpr uint64_t kMagic = 0x706f6820'70747230;
constexpr auto kLongest = std::chrono::hours(24 * 365);  // maximum timeout

// Precedes the bytes of a hop, to detect ranks that are out of step.
struct Header {
  uint64_t magic = kMagic;
  std::array<uint64_t, kMaxTensors> bytes{};
  uint64_t parts = 0;
  HopToken token;
};
static_assert(sizeof(Header) == 288);

enum class Direction : size_t { out, in };

size_t total(const std::vector<Span>& spans) {
  size_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

std::vector<iovec> chunks_of(Header& header, const std::vector<Span>& spans) {
  std::vector<iovec> chunks{{&header, sizeof header}};
  for (const Span& span : spans) {
    if (span.bytes > 0) chunks.push_back({span.data, span.bytes});
  }
  return chunks;
}

// A hop in flight.
struct PendingHop {
  Hop hop;
  std::array<std::atomic<bool>, 2> done{};  // by direction
  Clock::time_point arrived;                // valid once `in` is done
};

class SocketTransport : public TcpTransport, public std::enable_shared_from_this<SocketTransport> {
 public:
  SocketTransport(int rank, int ranks, const std::string& host, std::chrono::milliseconds timeout)
      : ranks_(ranks),
        timeout_(std::min<std::chrono::milliseconds>(timeout, kLongest)),
        peers_(rank, ranks, host, [this](const Lost& lost) { on_peer_failure(lost); }) {}

  ~SocketTransport() override { abort("dropped"); }

  const char* name() const override { return "tcp"; }
  size_t most_tensors() const override { return kMaxTensors; }

  std::string address() const override { return peers_.address(); }

  void connect(const std::vector<std::string>& addresses) override {
    peers_.join(addresses, timeout_);
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      for (const Direction direction : {Direction::out, Direction::in}) {
        std::thread& thread = queue(channel, direction).thread;
        thread = start_thread([this, channel, direction] { serve(channel, direction); });
        const std::string title =
            concat("rtp_", rtp::name(channel), direction == Direction::out ? "_tx" : "_rx");  // at most 15 characters
        pthread_setname_np(thread.native_handle(), title.c_str());
      }
    }
  }

  std::unique_ptr<Transfer> post(const Hop& hop) override;

  at::Tensor allocate(Channel, int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(const std::string& reason) noexcept override { end(PeerState::failed, reason); }
  void close() override { end(PeerState::closed, "it was closed"); }

 private:
  friend class SocketTransfer;

  // The hops of one channel and direction that have not been sent or received, in the order of posting.
  struct HopQueue {
    std::deque<std::shared_ptr<PendingHop>> waiting;
    std::condition_variable wake;  // wakes the thread
    std::condition_variable done;  // wakes waits for a hop
    std::thread thread;
    std::map<int, Socket> to;  // used by the thread only; by peer
    std::map<int, Incoming> from;
  };

  HopQueue& queue(Channel channel, Direction direction) {
    return queues_[static_cast<size_t>(channel)][static_cast<size_t>(direction)];
  }

  void serve(Channel channel, Direction direction);
  void send(HopQueue& queue, const Hop& hop);
  void receive(HopQueue& queue, PendingHop& pending);
  void wait(const PendingHop& pending, Direction direction);
  // Throws if this rank's ring has failed or ended. Requires the lock.
  void check(const Hop& hop, Clock::duration waited);
  void on_peer_failure(const Lost& lost);
  void notify_all();
  void end(PeerState state, const std::string& reason) noexcept;

  const int ranks_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // guards the queues and the end
  std::array<std::array<HopQueue, 2>, 2> queues_;
  bool ending_ = false;
  std::string reason_;
  std::optional<Lost> lost_;    // the first peer whose ring failed
  std::exception_ptr failure_;  // error of a thread
  Peers peers_;                 // last member, because its thread calls on_peer_failure
};

class SocketTransfer : public Transfer {
 public:
  SocketTransfer(std::shared_ptr<SocketTransport> transport, std::shared_ptr<PendingHop> pending)
      : transport_(std::move(transport)), pending_(std::move(pending)) {}

  void wait_received() override { transport_->wait(*pending_, Direction::in); }
  void wait_sent() override { transport_->wait(*pending_, Direction::out); }
  Moment arrived() const override {
    return pending_->done[static_cast<size_t>(Direction::in)].load() ? host_moment(pending_->arrived) : nullptr;
  }

 private:
  std::shared_ptr<SocketTransport> transport_;
  std::shared_ptr<PendingHop> pending_;
};

std::unique_ptr<Transfer> SocketTransport::post(const Hop& hop) {
  RTP_ASSERT(hop.receive.size() <= kMaxTensors && hop.send.size() <= kMaxTensors, hop.describe(),
             " has too many parts");
  auto pending = std::make_shared<PendingHop>();
  pending->hop = hop;
  pending->arrived = Clock::now();
  const std::array<bool, 2> moves{total(hop.send) > 0, total(hop.receive) > 0};
  {
    const std::lock_guard lock(mutex_);
    check(hop, {});
    for (const Direction direction : {Direction::out, Direction::in}) {
      if (moves[static_cast<size_t>(direction)]) {
        queue(hop.channel, direction).waiting.push_back(pending);
      } else {
        pending->done[static_cast<size_t>(direction)] = true;
      }
    }
  }
  for (const Direction direction : {Direction::in, Direction::out}) {
    if (moves[static_cast<size_t>(direction)]) queue(hop.channel, direction).wake.notify_one();
  }
  return std::make_unique<SocketTransfer>(shared_from_this(), std::move(pending));
}

void SocketTransport::wait(const PendingHop& pending, Direction direction) {
  const std::atomic<bool>& done = pending.done[static_cast<size_t>(direction)];
  if (done.load()) return;
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  std::condition_variable& wake = queue(pending.hop.channel, direction).done;
  const auto ended = [&] {
    if (!done.load()) check(pending.hop, Clock::now() - start);
    return done.load();
  };
  if (wait_until(wake, lock, start + timeout_, ended)) return;
  const int peer = direction == Direction::in ? pending.hop.from : pending.hop.to;
  const std::string problem = peers_.problem();
  throw_timeout(pending.hop, peer, Clock::now() - start, problem.empty() ? "timeout" : problem);
}

void SocketTransport::check(const Hop& hop, Clock::duration waited) {
  if (failure_) std::rethrow_exception(failure_);
  if (lost_) throw_timeout(hop, lost_->rank, waited, lost_->reason);
  if (ending_) throw RotationError(concat(hop.describe(), ": the ring cannot be used any more: ", reason_));
}

void SocketTransport::serve(Channel channel, Direction direction) {
  HopQueue& queue = this->queue(channel, direction);
  while (true) {
    std::shared_ptr<PendingHop> pending;
    {
      std::unique_lock lock(mutex_);
      queue.wake.wait(lock, [&] { return ending_ || !queue.waiting.empty(); });
      if (ending_) return;
      pending = std::move(queue.waiting.front());
      queue.waiting.pop_front();
    }
    const Hop& hop = pending->hop;
    const auto start = Clock::now();
    try {
      try {
        direction == Direction::out ? send(queue, hop) : receive(queue, *pending);
      } catch (const ConnectionError& error) {
        const int peer = direction == Direction::out ? hop.to : hop.from;
        throw_timeout(hop, peer, Clock::now() - start, peers_.reason_of_loss(peer, error.what()));
      }
    } catch (const Stopped&) {
      return;
    } catch (const std::exception& error) {
      {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
      peers_.announce(PeerState::failed, error.what());
      notify_all();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      pending->done[static_cast<size_t>(direction)] = true;
    }
    queue.done.notify_all();
  }
}

void SocketTransport::send(HopQueue& queue, const Hop& hop) {
  peers_.check(hop.to);
  Socket& socket = queue.to[hop.to];
  // waits for the hop enforce the timeout
  if (!socket) socket = peers_.connect(hop.to, hop.channel, peers_.stop(), kLongest);
  Header header;
  header.token = HopToken::of(hop);
  header.parts = hop.send.size();
  for (size_t index = 0; index < hop.send.size(); ++index) header.bytes[index] = hop.send[index].bytes;
  send_all(socket, chunks_of(header, hop.send), peers_.stop());
}

void SocketTransport::receive(HopQueue& queue, PendingHop& pending) {
  const Hop& hop = pending.hop;
  Incoming& incoming = queue.from[hop.from];
  if (!incoming) incoming = Incoming(peers_.accept(hop.from, hop.channel));
  Header header;
  bool checked = false;
  const auto check = [&](size_t received) {
    if (checked || received < sizeof header) return;
    checked = true;
    const auto wrong = [&](const auto&... what) {
      throw RotationError(concat(hop.describe(), ": rank ", hop.from, " of the ring sent ", what...));
    };
    if (header.magic != kMagic) wrong("bytes that are no hop");
    header.token.expect(hop, hop.from, "sent");
    if (header.parts != hop.receive.size()) wrong(header.parts, " tensors, expected ", hop.receive.size());
    for (size_t index = 0; index < hop.receive.size(); ++index) {
      const uint64_t expected = hop.receive[index].bytes, found = header.bytes[index];
      if (found != expected) wrong(found, " bytes, expected ", expected);
    }
  };
  if (!incoming.receive_all(chunks_of(header, hop.receive), peers_.stop(), check)) {
    throw ConnectionError("it ended the connection");
  }
  pending.arrived = Clock::now();
}

void SocketTransport::on_peer_failure(const Lost& lost) {
  {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = lost;
  }
  notify_all();
}

void SocketTransport::notify_all() {
  for (auto& channel : queues_) {
    for (HopQueue& queue : channel) queue.done.notify_all();
  }
}

void SocketTransport::end(PeerState state, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return;
    ending_ = true;
    reason_ = reason;
  }
  peers_.announce(state, reason);
  notify_all();
  for (auto& channel : queues_) {
    for (HopQueue& queue : channel) queue.wake.notify_all();
  }
  peers_.leave();
  for (auto& channel : queues_) {
    for (HopQueue& queue : channel) {
      if (queue.thread.joinable()) queue.thread.join();
      queue.to.clear();
      queue.from.clear();
    }
  }
}

}  // namespace

std::shared_ptr<TcpTransport> make_tcp_transport(int rank, int ranks, const std::string& host,
                                                 std::chrono::milliseconds timeout) {
  return make_owned<SocketTransport>(rank, ranks, host, timeout);
}

}  // namespace rtp
