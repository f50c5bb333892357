#include "transport/tcp/peers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>
#include <utility>

namespace rtp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kHelloMagic = 0x31706374'70747230;  // identifies this protocol and the byte order
constexpr uint32_t kNotices = 2;  // purpose of a connection; smaller values are the channel of its hops
constexpr auto kPatience = std::chrono::seconds(10);  // limit for a silent connection
constexpr auto kGrace = std::chrono::seconds(1);      // limit for a connection that arrives after the notice of its end

}  // namespace

struct Peers::Hello {
  uint64_t magic = kHelloMagic;
  Key key{};
  uint32_t rank = 0;
  uint32_t purpose = 0;
};

// Sent to an admitted rank, and by a rank that ends its ring, with the reason.
struct Peers::Notice {
  PeerState state = PeerState::present;
  char reason[511] = {};
};

struct Peers::PendingConnection {
  Socket socket;
  Clock::time_point since;
  std::string said;
};

Peers::Peers(int rank, int ranks, const std::string& host, std::function<void(const Lost&)> on_failure)
    : rank_(rank),
      ranks_(ranks),
      host_(host),
      on_failure_(std::move(on_failure)),
      stop_(make_stop()),
      listener_(listen_at(host, 3 * ranks + 16)),
      peers_(static_cast<size_t>(ranks)) {
  std::random_device random;
  for (uint64_t& word : key_.token) word = (static_cast<uint64_t>(random()) << 32) | random();
}

Peers::~Peers() { leave(); }

std::string Peers::address() const {
  return concat(host_, " ", port_of(listener_), " ", key_.token[0], " ", key_.token[1]);
}

void Peers::join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "transport tcp: expected ", ranks_, " addresses, got ",
                  addresses.size());
  for (int rank = ranks_ - 1; rank >= 0; --rank) {  // the ring uses the token of rank 0
    Peer& peer = peers_[static_cast<size_t>(rank)];
    std::istringstream fields(addresses[static_cast<size_t>(rank)]);
    fields >> peer.host >> peer.port >> key_.token[0] >> key_.token[1];
    RTP_CHECK_VALUE(fields && (fields >> std::ws).eof(), "transport tcp: expected an address 'host port token token', ",
                    "got '", addresses[static_cast<size_t>(rank)], "'");
  }
  const auto named = [&](int rank, const auto&... what) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    return concat("transport tcp: rank ", rank, " of the ring at ", peer.host, " port ", peer.port, what...);
  };
  peers_[static_cast<size_t>(rank_)].state = PeerState::present;
  for (int rank = 0; rank < rank_; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    try {
      peer.notices = connect_to(peer.host, peer.port, stop_, timeout);
      say_hello(peer.notices, kNotices);
    } catch (const ConnectionError& error) {
      throw RotationError(named(rank, ": ", error.what()));
    }
  }
  watcher_ = std::thread([this] { watch(); });
  std::unique_lock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) {
    const PeerState& state = peers_[static_cast<size_t>(rank)].state;
    if (!changed_.wait_until(lock, deadline, [&] { return state != PeerState::awaited; })) {
      throw RotationError(named(rank, " did not join (waited ", timeout.count() / 1000.0, " s)"));
    }
    if (state == PeerState::gone) throw RotationError(named(rank, " refused to let rank ", rank_, " in"));
  }
}

void Peers::say_hello(const Socket& socket, uint32_t purpose) const {
  Hello hello{kHelloMagic, key_, static_cast<uint32_t>(rank_), purpose};
  send_all(socket, {{&hello, sizeof hello}}, stop_);
}

std::string Peers::lost_reason(int peer) const {
  switch (peers_[static_cast<size_t>(peer)].state) {
    case PeerState::closed:
      return "it closed its ring";
    case PeerState::failed:
      return concat("its ring failed: ", peers_[static_cast<size_t>(peer)].reason);
    case PeerState::gone:
      return "its process has ended";
    default:
      return "";
  }
}

void Peers::check(int peer) {
  const std::lock_guard lock(mutex_);
  if (const std::string reason = lost_reason(peer); !reason.empty()) throw ConnectionError(reason);
}

std::string Peers::reason_of_loss(int peer, const std::string& seen) {
  std::unique_lock lock(mutex_);
  std::string reason;
  changed_.wait_for(lock, kGrace, [&] { return left_ || !(reason = lost_reason(peer)).empty(); });
  return reason.empty() ? seen : reason;
}

Socket Peers::connect(int peer, Channel channel) {
  check(peer);
  const Peer& known = peers_[static_cast<size_t>(peer)];
  // waits for the hop enforce the timeout
  Socket socket = connect_to(known.host, known.port, stop_, std::chrono::hours(1));
  say_hello(socket, static_cast<uint32_t>(channel));
  return socket;
}

Socket Peers::accept(int peer, Channel channel) {
  std::unique_lock lock(mutex_);
  Peer& known = peers_[static_cast<size_t>(peer)];
  Socket& made = known.hops[static_cast<size_t>(channel)];
  while (!made) {
    if (left_) throw Stopped{};
    const std::string reason = lost_reason(peer);
    if (reason.empty()) {
      changed_.wait(lock);
    } else if (Clock::now() > known.since + kGrace) {
      throw ConnectionError(reason);
    } else {
      changed_.wait_until(lock, known.since + kGrace);
    }
  }
  return std::move(made);
}

void Peers::announce(PeerState state, const std::string& reason) noexcept {
  Notice notice{state, {}};
  std::strncpy(notice.reason, reason.c_str(), sizeof notice.reason - 1);
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    // Small enough for the socket buffer; a peer that has not read earlier notices detects the end of the connection
    // instead.
    if (peer.notices) send(peer.notices.fd(), &notice, sizeof notice, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

void Peers::leave() noexcept {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  raise_stop(stop_);
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  const std::lock_guard lock(mutex_);
  listener_ = Socket();
  for (Peer& peer : peers_) {
    peer.notices = Socket();
    peer.hops = {};
  }
}

void Peers::watch() {
  std::list<PendingConnection> pending;
  while (true) {
    std::vector<pollfd> all{{stop_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    std::vector<int> ranks;
    {
      const std::lock_guard lock(mutex_);
      for (int rank = 0; rank < ranks_; ++rank) {
        if (const Socket& notices = peers_[static_cast<size_t>(rank)].notices) {
          all.push_back({notices.fd(), POLLIN, 0});
          ranks.push_back(rank);
        }
      }
    }
    for (const PendingConnection& connection : pending) all.push_back({connection.socket.fd(), POLLIN, 0});
    poll(all.data(), all.size(), pending.empty() ? -1 : 1000);
    if (all[0].revents != 0) return;
    while (Socket socket = accept_at(listener_)) pending.push_back({std::move(socket), Clock::now(), {}});
    read_hellos(pending);
    for (size_t index = 0; index < ranks.size(); ++index) {
      if (all[index + 2].revents != 0) read_notice(ranks[index]);
    }
  }
}

// Admits connections whose hello has arrived.
void Peers::read_hellos(std::list<PendingConnection>& pending) {
  for (auto each = pending.begin(); each != pending.end();) {
    Hello hello;
    char* const text = reinterpret_cast<char*>(&hello);
    const ssize_t found = recv(each->socket.fd(), text, sizeof hello - each->said.size(), MSG_DONTWAIT);
    const bool silent = found < 0 && (errno == EAGAIN || errno == EINTR);
    if (found > 0) each->said.append(text, static_cast<size_t>(found));
    if (each->said.size() == sizeof hello) {
      std::memcpy(text, each->said.data(), sizeof hello);
      admit(hello, std::move(each->socket));
      each = pending.erase(each);
    } else if (found > 0 || (silent && Clock::now() < each->since + kPatience)) {
      ++each;
    } else {
      each = pending.erase(each);
    }
  }
}

void Peers::admit(const Hello& hello, Socket socket) {
  const auto rank = static_cast<int>(hello.rank);
  if (hello.magic != kHelloMagic || !(hello.key == key_) || rank < 0 || rank >= ranks_ || hello.purpose > kNotices)
    return;
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[hello.rank];
    Socket& place = hello.purpose == kNotices ? peer.notices : peer.hops[hello.purpose];
    if (place || rank == rank_) return;
    place = std::move(socket);
    if (hello.purpose == kNotices) {
      peer.state = PeerState::present;
      const Notice welcome;
      send(place.fd(), &welcome, sizeof welcome, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
  }
  changed_.notify_all();
}

void Peers::read_notice(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];  // only this thread accesses the read state
  Notice notice;
  char* const text = reinterpret_cast<char*>(&notice);
  const ssize_t found = recv(peer.notices.fd(), text, sizeof notice - peer.partial_notice.size(), MSG_DONTWAIT);
  if (found < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (found <= 0) {
    set_state(rank, PeerState::gone);
    return;
  }
  peer.partial_notice.append(text, static_cast<size_t>(found));
  if (peer.partial_notice.size() < sizeof notice) return;
  std::memcpy(text, peer.partial_notice.data(), sizeof notice);
  peer.partial_notice.clear();
  notice.reason[sizeof notice.reason - 1] = '\0';
  set_state(rank, notice.state, notice.reason);
  if (notice.state == PeerState::failed) on_failure_({rank, lost_reason(rank)});  // only this thread changes the state
}

void Peers::set_state(int rank, PeerState state, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (state == PeerState::gone) {
      peer.notices = Socket();
      if (peer.state == PeerState::closed || peer.state == PeerState::failed) return;
    }
    peer.state = state;
    peer.reason = reason;
    peer.since = Clock::now();
  }
  changed_.notify_all();
}

}  // namespace rtp
