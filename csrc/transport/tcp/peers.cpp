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

constexpr uint64_t kHelloMagic = 0x31706374'70747230;  // of this protocol, on hosts of one byte order
constexpr uint32_t kNews = 2;                          // the purpose of a connection; below it: the channel of its hops
constexpr auto kPatience = std::chrono::seconds(10);   // with a stranger who says nothing
constexpr auto kGrace = std::chrono::seconds(1);       // for a connection to arrive later than the news of its end

}  // namespace

struct Peers::Hello {
  uint64_t magic = kHelloMagic;
  Key key{};
  uint32_t rank = 0;
  uint32_t purpose = 0;
};

// A rank that was let in is told so; a rank that ends its ring tells why.
struct Peers::News {
  Life life = Life::present;
  char reason[511] = {};
};

struct Peers::Stranger {
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
  for (uint64_t& index : key_.token) index = (static_cast<uint64_t>(random()) << 32) | random();
}

Peers::~Peers() { leave(); }

std::string Peers::address() const {
  return concat(host_, " ", port_of(listener_), " ", key_.token[0], " ", key_.token[1]);
}

void Peers::join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  RTP_CHECK_VALUE(static_cast<int>(addresses.size()) == ranks_, "transport tcp: expected ", ranks_, " addresses, got ",
                  addresses.size());
  for (int rank = ranks_ - 1; rank >= 0; --rank) {  // the token of rank 0 is the ring's
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
  peers_[static_cast<size_t>(rank_)].life = Life::present;
  for (int rank = 0; rank < rank_; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    try {
      peer.news = connect_to(peer.host, peer.port, stop_, timeout);
      say_hello(peer.news, kNews);
    } catch (const ConnectionError& error) {
      throw RotationError(named(rank, ": ", error.what()));
    }
  }
  watcher_ = std::thread([this] { watch(); });
  std::unique_lock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) {
    const Life& life = peers_[static_cast<size_t>(rank)].life;
    if (!changed_.wait_until(lock, deadline, [&] { return life != Life::awaited; })) {
      throw RotationError(named(rank, " did not join (waited ", timeout.count() / 1000.0, " s)"));
    }
    if (life == Life::gone) throw RotationError(named(rank, " refused to let rank ", rank_, " in"));
  }
}

void Peers::say_hello(const Socket& socket, uint32_t purpose) const {
  Hello hello{kHelloMagic, key_, static_cast<uint32_t>(rank_), purpose};
  send_all(socket, {{&hello, sizeof hello}}, stop_);
}

std::string Peers::lost_reason(int peer) const {
  switch (peers_[static_cast<size_t>(peer)].life) {
    case Life::closed:
      return "it closed its ring";
    case Life::failed:
      return concat("its ring failed: ", peers_[static_cast<size_t>(peer)].reason);
    case Life::gone:
      return "its process has ended";
    default:
      return "";
  }
}

void Peers::check(int peer) {
  const std::lock_guard lock(mutex_);
  if (const std::string reason = lost_reason(peer); !reason.empty()) throw ConnectionError(reason);
}

std::string Peers::why_lost(int peer, const std::string& seen) {
  std::unique_lock lock(mutex_);
  std::string reason;
  changed_.wait_for(lock, kGrace, [&] { return left_ || !(reason = lost_reason(peer)).empty(); });
  return reason.empty() ? seen : reason;
}

Socket Peers::connect(int peer, Channel channel) {
  check(peer);
  const Peer& known = peers_[static_cast<size_t>(peer)];
  Socket socket = connect_to(known.host, known.port, stop_, std::chrono::hours(1));  // whoever waits for it gives up
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

void Peers::tell(Life life, const std::string& reason) noexcept {
  News news{life, {}};
  std::strncpy(news.reason, reason.c_str(), sizeof news.reason - 1);
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    // Little enough to be taken at once; who has not read the news before will see the end of the connection.
    if (peer.news) send(peer.news.fd(), &news, sizeof news, MSG_DONTWAIT | MSG_NOSIGNAL);
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
    peer.news = Socket();
    peer.hops = {};
  }
}

void Peers::watch() {
  std::list<Stranger> strangers;
  while (true) {
    std::vector<pollfd> all{{stop_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    std::vector<int> ranks;
    {
      const std::lock_guard lock(mutex_);
      for (int rank = 0; rank < ranks_; ++rank) {
        if (const Socket& news = peers_[static_cast<size_t>(rank)].news) {
          all.push_back({news.fd(), POLLIN, 0});
          ranks.push_back(rank);
        }
      }
    }
    for (const Stranger& stranger : strangers) all.push_back({stranger.socket.fd(), POLLIN, 0});
    poll(all.data(), all.size(), strangers.empty() ? -1 : 1000);
    if (all[0].revents != 0) return;
    while (Socket socket = accept_at(listener_)) strangers.push_back({std::move(socket), Clock::now(), {}});
    greet(strangers);
    for (size_t index = 0; index < ranks.size(); ++index) {
      if (all[index + 2].revents != 0) listen_to(ranks[index]);
    }
  }
}

// Lets in those who have said who they are.
void Peers::greet(std::list<Stranger>& strangers) {
  for (auto each = strangers.begin(); each != strangers.end();) {
    Hello hello;
    char* const text = reinterpret_cast<char*>(&hello);
    const ssize_t found = recv(each->socket.fd(), text, sizeof hello - each->said.size(), MSG_DONTWAIT);
    const bool silent = found < 0 && (errno == EAGAIN || errno == EINTR);
    if (found > 0) each->said.append(text, static_cast<size_t>(found));
    if (each->said.size() == sizeof hello) {
      std::memcpy(text, each->said.data(), sizeof hello);
      admit(hello, std::move(each->socket));
      each = strangers.erase(each);
    } else if (found > 0 || (silent && Clock::now() < each->since + kPatience)) {
      ++each;
    } else {
      each = strangers.erase(each);
    }
  }
}

void Peers::admit(const Hello& hello, Socket socket) {
  const auto rank = static_cast<int>(hello.rank);
  if (hello.magic != kHelloMagic || !(hello.key == key_) || rank < 0 || rank >= ranks_ || hello.purpose > kNews) return;
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[hello.rank];
    Socket& place = hello.purpose == kNews ? peer.news : peer.hops[hello.purpose];
    if (place || rank == rank_) return;
    place = std::move(socket);
    if (hello.purpose == kNews) {
      peer.life = Life::present;
      const News welcome;
      send(place.fd(), &welcome, sizeof welcome, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
  }
  changed_.notify_all();
}

void Peers::listen_to(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];  // what is read here is this thread's alone
  News news;
  char* const text = reinterpret_cast<char*>(&news);
  const ssize_t found = recv(peer.news.fd(), text, sizeof news - peer.heard.size(), MSG_DONTWAIT);
  if (found < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (found <= 0) {
    set_life(rank, Life::gone);
    return;
  }
  peer.heard.append(text, static_cast<size_t>(found));
  if (peer.heard.size() < sizeof news) return;
  std::memcpy(text, peer.heard.data(), sizeof news);
  peer.heard.clear();
  news.reason[sizeof news.reason - 1] = '\0';
  set_life(rank, news.life, news.reason);
  if (news.life == Life::failed) on_failure_({rank, lost_reason(rank)});  // this thread alone changes it
}

void Peers::set_life(int rank, Life life, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (life == Life::gone) {
      peer.news = Socket();
      if (peer.life == Life::closed || peer.life == Life::failed) return;
    }
    peer.life = life;
    peer.reason = reason;
    peer.since = Clock::now();
  }
  changed_.notify_all();
}

}  // namespace rtp
