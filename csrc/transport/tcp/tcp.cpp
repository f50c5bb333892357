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
#include "transport/tcp/peers.h"

namespace rtp {
namespace {

using Clock = HostClock;
using Life = Peers::Life;

constexpr size_t kMaxTensors = 8;  // of a hop
constexpr uint64_t kMagic = 0x706f6820'70747230;
constexpr auto kJoining = std::chrono::seconds(20);      // that connecting to all ranks may take at most
constexpr auto kLongest = std::chrono::hours(24 * 365);  // of a timeout

// Travels before the bytes of a hop, so that ranks that are out of step notice.
struct Header {
  uint64_t magic = kMagic;
  uint64_t identity = 0;
  std::array<uint64_t, kMaxTensors> bytes{};
  uint64_t parts = 0;
  char hop[168] = {};  // in words
};
static_assert(sizeof(Header) == 256);

enum class Way : size_t { out, in };

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

// One hop, while it is under way.
struct Flight {
  Hop hop;
  std::array<std::atomic<bool>, 2> done{};  // by way
  Clock::time_point arrived;                // once `in` is done
};

class SocketTransport : public TcpTransport, public std::enable_shared_from_this<SocketTransport> {
 public:
  SocketTransport(int rank, int ranks, const std::string& host, std::chrono::milliseconds timeout)
      : ranks_(ranks),
        timeout_(std::min<std::chrono::milliseconds>(timeout, kLongest)),
        peers_(rank, ranks, host, [this](const Peers::Lost& lost) { lose(lost); }) {}

  ~SocketTransport() override { abort("dropped"); }

  const char* name() const override { return "tcp"; }
  size_t most_tensors() const override { return kMaxTensors; }

  std::string address() const override { return peers_.address(); }

  void connect(const std::vector<std::string>& addresses) override {
    // Ranks that are reached and wait for one that is not are still in time to hear of it from the caller.
    peers_.join(addresses, std::min<std::chrono::milliseconds>(timeout_ / 2, kJoining));
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      for (const Way way : {Way::out, Way::in}) {
        std::thread& thread = line(channel, way).thread;
        thread = std::thread([this, channel, way] { serve(channel, way); });
        const std::string title = concat("rtp_", rtp::name(channel), way == Way::out ? "_tx" : "_rx");  // 15 at most
        pthread_setname_np(thread.native_handle(), title.c_str());
      }
    }
  }

  std::unique_ptr<Transfer> post(const Hop& hop) override;

  at::Tensor allocate(Channel, int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(const std::string& reason) noexcept override { end(Life::failed, reason); }
  void close() override { end(Life::closed, "it was closed"); }

 private:
  friend class SocketTransfer;

  // The hops of one channel that are yet to be sent, or yet to arrive, in the order of posting.
  struct Line {
    std::deque<std::shared_ptr<Flight>> waiting;
    std::condition_variable wake;  // of the thread
    std::condition_variable done;  // of whoever waits for a hop
    std::thread thread;
    std::map<int, Socket> to;  // the thread's, by peer
    std::map<int, Incoming> from;
  };

  Line& line(Channel channel, Way way) { return lines_[static_cast<size_t>(channel)][static_cast<size_t>(way)]; }

  void serve(Channel channel, Way way);
  void send(Line& line, const Hop& hop);
  void receive(Line& line, Flight& flight);
  void wait(const Flight& flight, Way way);
  // Throws why this rank's ring cannot go on, if it cannot. Called with the lock held.
  void check(const Hop& hop, Clock::duration waited);
  void lose(const Peers::Lost& lost);
  void notify_all();
  void end(Life life, const std::string& reason) noexcept;

  const int ranks_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // of the lines and of the end
  std::array<std::array<Line, 2>, 2> lines_;
  bool ending_ = false;
  std::string reason_;
  std::optional<Peers::Lost> lost_;  // the first peer whose ring failed
  std::exception_ptr failure_;       // what a thread met
  Peers peers_;                      // last: its thread calls `lose`
};

class SocketTransfer : public Transfer {
 public:
  SocketTransfer(std::shared_ptr<SocketTransport> transport, std::shared_ptr<Flight> flight)
      : transport_(std::move(transport)), flight_(std::move(flight)) {}

  void wait_received() override { transport_->wait(*flight_, Way::in); }
  void wait_sent() override { transport_->wait(*flight_, Way::out); }
  Moment arrived() const override {
    return flight_->done[static_cast<size_t>(Way::in)].load() ? host_moment(flight_->arrived) : nullptr;
  }

 private:
  std::shared_ptr<SocketTransport> transport_;
  std::shared_ptr<Flight> flight_;
};

std::unique_ptr<Transfer> SocketTransport::post(const Hop& hop) {
  RTP_ASSERT(hop.receive.size() <= kMaxTensors && hop.send.size() <= kMaxTensors, hop.describe(),
             " has too many parts");
  auto flight = std::make_shared<Flight>();
  flight->hop = hop;
  flight->arrived = Clock::now();
  const std::array<bool, 2> moves{total(hop.send) > 0, total(hop.receive) > 0};
  {
    const std::lock_guard lock(mutex_);
    check(hop, {});
    for (const Way way : {Way::out, Way::in}) {
      if (moves[static_cast<size_t>(way)]) {
        line(hop.channel, way).waiting.push_back(flight);
      } else {
        flight->done[static_cast<size_t>(way)] = true;
      }
    }
  }
  for (const Way way : {Way::in, Way::out}) {
    if (moves[static_cast<size_t>(way)]) line(hop.channel, way).wake.notify_one();
  }
  return std::make_unique<SocketTransfer>(shared_from_this(), std::move(flight));
}

void SocketTransport::wait(const Flight& flight, Way way) {
  const std::atomic<bool>& done = flight.done[static_cast<size_t>(way)];
  if (done.load()) return;
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  std::condition_variable& wake = line(flight.hop.channel, way).done;
  while (!done.load()) {
    check(flight.hop, Clock::now() - start);
    if (wake.wait_until(lock, start + timeout_) == std::cv_status::timeout && !done.load()) {
      check(flight.hop, Clock::now() - start);
      const int peer = way == Way::in ? flight.hop.from : flight.hop.to;
      throw_timeout(flight.hop, peer, Clock::now() - start, "timeout");
    }
  }
}

void SocketTransport::check(const Hop& hop, Clock::duration waited) {
  if (failure_) std::rethrow_exception(failure_);
  if (lost_) throw_timeout(hop, lost_->rank, waited, lost_->reason);
  if (ending_) throw RotationError(concat(hop.describe(), ": the ring cannot be used any more: ", reason_));
}

void SocketTransport::serve(Channel channel, Way way) {
  Line& line = this->line(channel, way);
  while (true) {
    std::shared_ptr<Flight> flight;
    {
      std::unique_lock lock(mutex_);
      line.wake.wait(lock, [&] { return ending_ || !line.waiting.empty(); });
      if (ending_) return;
      flight = std::move(line.waiting.front());
      line.waiting.pop_front();
    }
    const Hop& hop = flight->hop;
    const auto start = Clock::now();
    try {
      try {
        way == Way::out ? send(line, hop) : receive(line, *flight);
      } catch (const ConnectionError& error) {
        const int peer = way == Way::out ? hop.to : hop.from;
        throw_timeout(hop, peer, Clock::now() - start, peers_.why_lost(peer, error.what()));
      }
    } catch (const Stopped&) {
      return;
    } catch (const std::exception& error) {
      {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
      peers_.tell(Life::failed, error.what());
      notify_all();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      flight->done[static_cast<size_t>(way)] = true;
    }
    line.done.notify_all();
  }
}

void SocketTransport::send(Line& line, const Hop& hop) {
  peers_.check(hop.to);
  Socket& socket = line.to[hop.to];
  if (!socket) socket = peers_.connect(hop.to, hop.channel);
  Header header;
  header.identity = hop.identity();
  header.parts = hop.send.size();
  for (size_t index = 0; index < hop.send.size(); ++index) header.bytes[index] = hop.send[index].bytes;
  std::strncpy(header.hop, hop.describe().c_str(), sizeof header.hop - 1);
  send_all(socket, chunks_of(header, hop.send), peers_.stop());
}

void SocketTransport::receive(Line& line, Flight& flight) {
  const Hop& hop = flight.hop;
  Incoming& incoming = line.from[hop.from];
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
    header.hop[sizeof header.hop - 1] = '\0';
    if (header.identity != hop.identity()) wrong(header.hop, ": the ranks of the ring are out of step");
    if (header.parts != hop.receive.size()) wrong(header.parts, " tensors, expected ", hop.receive.size());
    for (size_t index = 0; index < hop.receive.size(); ++index) {
      const uint64_t expected = hop.receive[index].bytes, found = header.bytes[index];
      if (found != expected) wrong(found, " bytes, expected ", expected);
    }
  };
  incoming.receive_all(chunks_of(header, hop.receive), peers_.stop(), check);
  flight.arrived = Clock::now();
}

void SocketTransport::lose(const Peers::Lost& lost) {
  {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = lost;
  }
  notify_all();
}

void SocketTransport::notify_all() {
  for (auto& channel : lines_) {
    for (Line& line : channel) line.done.notify_all();
  }
}

void SocketTransport::end(Life life, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return;
    ending_ = true;
    reason_ = reason;
  }
  peers_.tell(life, reason);
  notify_all();
  for (auto& channel : lines_) {
    for (Line& line : channel) line.wake.notify_all();
  }
  peers_.leave();
  for (auto& channel : lines_) {
    for (Line& line : channel) {
      if (line.thread.joinable()) line.thread.join();
      line.to.clear();
      line.from.clear();
    }
  }
}

}  // namespace

std::shared_ptr<TcpTransport> make_tcp_transport(int rank, int ranks, const std::string& host,
                                                 std::chrono::milliseconds timeout) {
  return make_owned<SocketTransport>(rank, ranks, host, timeout);
}

}  // namespace rtp
