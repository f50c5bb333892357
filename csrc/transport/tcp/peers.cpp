#include "transport/tcp/peers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/host.h"
#include "base/threads.h"

namespace rtp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kHelloMagic = 0x32706374'70747230;  // identifies this protocol and the byte order
constexpr uint32_t kNotices = 2;  // purpose of a connection; smaller values are the channel of its hops or pulls
constexpr auto kJoining = std::chrono::seconds(20);            // maximum time to connect to all ranks
constexpr auto kPatience = std::chrono::seconds(10);           // limit for a connection without a proof
constexpr size_t kMostPending = 64;                            // connections without a proof, besides those of ranks
constexpr auto kGrace = std::chrono::seconds(1);               // limit for one that arrives after the notice of its end
constexpr auto kNoResources = std::chrono::milliseconds(100);  // pause of the listener without descriptors

}  // namespace

// Sent by the rank that opens a connection.
struct Peers::Hello {
  uint64_t magic = kHelloMagic;
  uint64_t drawn = 0;
  uint32_t from = 0, to = 0;
  uint32_t purpose = 0;
  uint32_t unused = 0;
};

// The answer to it. The other end then sends its own proof.
struct Peers::Challenge {
  uint64_t drawn = 0;
  uint64_t proof = 0;
};

// Sent to an admitted rank, and by a rank that ends its ring, with the reason.
struct Peers::Notice {
  PeerState state = PeerState::present;
  char reason[511] = {};
};

struct Peers::PendingConnection {
  Socket socket;
  Clock::time_point since;
  std::string said;  // of the message that is expected: the hello, then the proof
  std::optional<Hello> hello;
  uint64_t drawn = 0;
};

Peers::Peers(int rank, int ranks, const std::string& host, std::function<void(const Lost&)> on_failure)
    : rank_(rank),
      ranks_(ranks),
      host_(host),
      on_failure_(std::move(on_failure)),
      stop_(make_stop()),
      listener_(listen_at(host, 3 * ranks + 16)),
      peers_(static_cast<size_t>(ranks)) {
  for (uint64_t& word : key_) word = random_number();
}

Peers::~Peers() { leave(); }

std::string Peers::address() const { return concat(host_, " ", port_of(listener_), " ", key_[0], " ", key_[1]); }

void Peers::join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout) {
  timeout = std::min<std::chrono::milliseconds>(timeout / 2, kJoining);
  const auto deadline = Clock::now() + timeout;
  RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "transport tcp: expected ", ranks_, " addresses, got ",
                  addresses.size());
  for (int rank = ranks_ - 1; rank >= 0; --rank) {  // the ring uses the key of rank 0
    Peer& peer = peers_[static_cast<size_t>(rank)];
    std::istringstream fields(addresses[static_cast<size_t>(rank)]);
    fields >> peer.host >> peer.port >> key_[0] >> key_[1];
    RTP_CHECK_VALUE(fields && (fields >> std::ws).eof(), "transport tcp: expected an address 'host port token token', ",
                    "got '", addresses[static_cast<size_t>(rank)], "'");
  }
  peers_[static_cast<size_t>(rank_)].state = PeerState::present;
  const auto left = [&] { return std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()); };
  for (int rank = 0; rank < rank_; ++rank) {
    try {
      peers_[static_cast<size_t>(rank)].notices = open(rank, kNotices, stop_, left());
    } catch (const RotationError& error) {
      throw RotationError(concat("transport tcp: ", describe(rank), ": ", error.what()));
    }
  }
  watcher_ = start_thread([this] { watch(); });
  std::unique_lock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) {
    const PeerState& state = peers_[static_cast<size_t>(rank)].state;
    changed_.wait_until(lock, deadline, [&] { return state != PeerState::awaited || !problem_.empty(); });
    if (!problem_.empty()) throw RotationError(concat("transport tcp: ", problem_));
    if (state == PeerState::awaited) {
      throw RotationError(
          concat("transport tcp: ", describe(rank), " did not join (waited ", timeout.count() / 1000.0, " s)"));
    }
    if (state == PeerState::gone) {
      throw RotationError(concat("transport tcp: ", describe(rank), " refused to let rank ", rank_, " in"));
    }
  }
}

std::string Peers::describe(int peer) const {
  const Peer& known = peers_[static_cast<size_t>(peer)];
  return concat("rank ", peer, " of the ring at ", known.host, " port ", known.port);
}

// Returns what a rank proves itself with: the end that opened a connection, or the other one.
uint64_t Peers::proof(bool of_opener, const Hello& hello, uint64_t drawn) const {
  const uint64_t ends = uint64_t{hello.from} << 32 | hello.to, purpose = uint64_t{hello.purpose} << 1 | of_opener;
  return siphash<4>(key_, {hello.drawn, drawn, ends, purpose});
}

Socket Peers::open(int peer, uint32_t purpose, const Socket& stop, std::chrono::milliseconds timeout) const {
  const Peer& known = peers_[static_cast<size_t>(peer)];
  const auto deadline = Clock::now() + timeout;
  Incoming made(connect_to(known.host, known.port, stop, timeout));
  Hello hello{kHelloMagic, random_number(), static_cast<uint32_t>(rank_), static_cast<uint32_t>(peer), purpose};
  send_all(made.socket(), {{&hello, sizeof hello}}, stop);
  Challenge challenge;
  const auto left = std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()), {});
  if (!made.receive_all({{&challenge, sizeof challenge}}, stop, [](size_t) {}, left)) {
    throw ConnectionError("it refused the connection");
  }
  if (challenge.proof != proof(/*of_opener=*/false, hello, challenge.drawn)) {
    throw ConnectionError("what answers there is no rank of this ring: it does not know the key");
  }
  uint64_t own = proof(/*of_opener=*/true, hello, challenge.drawn);
  send_all(made.socket(), {{&own, sizeof own}}, stop);
  return made.release();
}

std::string Peers::lost_reason(int peer) const {
  const Peer& known = peers_[static_cast<size_t>(peer)];
  return why_lost(known.state, known.reason);
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

std::string Peers::problem() {
  const std::lock_guard lock(mutex_);
  return problem_;
}

Socket Peers::connect(int peer, Channel channel, const Socket& stop, std::chrono::milliseconds timeout) {
  check(peer);
  return open(peer, static_cast<uint32_t>(channel), stop, timeout);
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
    const bool pauses = !problem().empty();
    if (pauses) all[1].fd = -1;
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
    poll(all.data(), all.size(), pauses ? kNoResources.count() : pending.empty() ? -1 : 1000);
    if (all[0].revents != 0) return;
    accept_all(pending);
    read_hellos(pending);
    for (size_t index = 0; index < ranks.size(); ++index) {
      if (all[index + 2].revents != 0) read_notice(ranks[index]);
    }
  }
}

// Without descriptors, pending connections wait in the listener. Of too many without a proof, the oldest ends.
void Peers::accept_all(std::list<PendingConnection>& pending) {
  std::string problem;
  try {
    while (Socket socket = accept_at(listener_)) {
      pending.push_back({std::move(socket), Clock::now(), {}, {}, 0});
      if (pending.size() > kMostPending + 3 * static_cast<size_t>(ranks_)) pending.pop_front();
    }
  } catch (const ConnectionError& error) {
    problem = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    if (problem == problem_) return;
    problem_ = problem;
  }
  changed_.notify_all();
}

// Admits connections whose proof has arrived.
void Peers::read_hellos(std::list<PendingConnection>& pending) {
  for (auto each = pending.begin(); each != pending.end();) {
    char text[sizeof(Hello)];
    const size_t wanted = each->hello ? sizeof(uint64_t) : sizeof(Hello);
    const ssize_t found = recv(each->socket.fd(), text, wanted - each->said.size(), MSG_DONTWAIT);
    const bool silent = found < 0 && (errno == EAGAIN || errno == EINTR);
    if (found > 0) each->said.append(text, static_cast<size_t>(found));
    const bool came = each->said.size() == wanted;
    const bool stays = came ? !each->hello && answer(*each) : found > 0 || silent;
    if (stays && Clock::now() < each->since + kPatience) {
      ++each;
      continue;
    }
    uint64_t said = 0;
    if (came && each->hello) {
      std::memcpy(&said, each->said.data(), sizeof said);
      if (said == proof(/*of_opener=*/true, *each->hello, each->drawn)) admit(*each->hello, std::move(each->socket));
    }
    each = pending.erase(each);
  }
}

// Answers a hello that has come. Returns false if it is not that of a rank.
bool Peers::answer(PendingConnection& connection) const {
  Hello hello;
  std::memcpy(&hello, connection.said.data(), sizeof hello);
  const uint32_t ranks = static_cast<uint32_t>(ranks_), own = static_cast<uint32_t>(rank_);
  if (hello.magic != kHelloMagic || hello.from >= ranks || hello.from == own || hello.to != own) return false;
  if (hello.purpose > kNotices) return false;
  connection.said.clear();
  connection.hello = hello;
  connection.drawn = random_number();
  const Challenge challenge{connection.drawn, proof(/*of_opener=*/false, hello, connection.drawn)};
  const ssize_t sent = send(connection.socket.fd(), &challenge, sizeof challenge, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(sizeof challenge);
}

void Peers::admit(const Hello& hello, Socket socket) {
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[hello.from];
    if (hello.purpose == kNotices) {
      if (peer.state != PeerState::awaited) return;
      peer.notices = std::move(socket);
      peer.state = PeerState::present;
      const Notice welcome;
      send(peer.notices.fd(), &welcome, sizeof welcome, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
      peer.hops[hello.purpose] = std::move(socket);
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
