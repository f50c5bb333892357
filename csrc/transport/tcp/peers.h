// The other ranks of a TCP ring: their state, and connections to them.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "schedule/schedule.h"
#include "transport/tcp/socket.h"

namespace rtp {

// Every two ranks share a connection for notices: that a rank closes its ring, or why it failed. Hops use separate
// connections, one per channel and direction, which the sender opens before its first hop. A thread accepts connections
// and reads notices; it sleeps while there are none.
class Peers {
 public:
  enum class PeerState : char { awaited, present, closed, failed, gone };

  struct Lost {
    int rank = 0;
    std::string reason;
  };

  // Listens at `host`, an address of this host. The thread calls `on_failure` when a peer's ring has failed.
  Peers(int rank, int ranks, const std::string& host, std::function<void(const Lost&)> on_failure);
  ~Peers();

  // Returns the address at which this rank listens, and the token that a peer must present.
  std::string address() const;
  // Connects to all ranks, given the address of each. Throws RotationError that names an unreachable rank.
  void join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout);

  // Return the connection for this rank's hops of a channel to `peer`, and the one for the hops from `peer`. Both throw
  // ConnectionError if the peer has left, and Stopped if this rank leaves.
  Socket connect(int peer, Channel channel);
  Socket accept(int peer, Channel channel);
  // Throws ConnectionError if the peer accepts no more hops.
  void check(int peer);
  // Returns why a connection to `peer` has ended: the reason in its notice, which may arrive slightly later, otherwise
  // `seen`.
  std::string reason_of_loss(int peer, const std::string& seen);

  // Sends all other ranks the notice that this rank's ring has failed or was closed.
  void announce(PeerState state, const std::string& reason) noexcept;
  // Interrupts all waits here and on sockets, and ends the thread. Idempotent.
  void leave() noexcept;
  const Socket& stop() const { return stop_; }

 private:
  struct Key {
    std::array<uint64_t, 2> token;
    bool operator==(const Key&) const = default;
  };
  struct Hello;
  struct Notice;
  struct PendingConnection;
  struct Peer {
    std::string host;
    int port = 0;
    PeerState state = PeerState::awaited;
    std::chrono::steady_clock::time_point since;  // time of the last change of `state`
    std::string reason;                           // reason of `closed` or `failed`
    Socket notices;
    std::string partial_notice;  // received part of a notice
    std::array<Socket, 2> hops;  // connections opened by the peer, by channel
  };

  void watch();
  void read_hellos(std::list<PendingConnection>& pending);
  void admit(const Hello& hello, Socket socket);
  void read_notice(int rank);
  void set_state(int rank, PeerState state, const std::string& reason = "");
  void say_hello(const Socket& socket, uint32_t purpose) const;
  std::string lost_reason(int peer) const;

  const int rank_;
  const int ranks_;
  const std::string host_;
  const std::function<void(const Lost&)> on_failure_;
  Key key_;
  Socket stop_;
  Socket listener_;
  std::thread watcher_;
  mutable std::mutex mutex_;  // guards the peers
  std::condition_variable changed_;
  bool left_ = false;
  std::vector<Peer> peers_;
};

}  // namespace rtp
