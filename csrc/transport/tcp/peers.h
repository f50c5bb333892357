// The other ranks of a ring over tcp: who they are, how they fare, and connections to them.
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

// Every two ranks hold a connection for news: that a rank closes its ring, or why it failed. Hops travel on connections
// of their own, one per channel and direction, that the sender makes when it first sends. A thread takes what connects
// and listens to the notices; it sleeps while there are none.
class Peers {
 public:
  enum class PeerState : char { awaited, present, closed, failed, gone };

  struct Lost {
    int rank = 0;
    std::string reason;
  };

  // Listens at `host`, an address of this host. `on_failure` is called by the thread when a peer's ring has failed.
  Peers(int rank, int ranks, const std::string& host, std::function<void(const Lost&)> on_failure);
  ~Peers();

  // Where this rank listens, and what a peer has to know to be let in.
  std::string address() const;
  // Connects to all ranks, given the address of each. Throws RotationError naming the one that cannot be reached.
  void join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout);

  // A connection that this rank's hops of a channel travel on, and the one on which those of `peer` arrive. Both throw
  // ConnectionError where the peer has gone, Stopped where this rank leaves.
  Socket connect(int peer, Channel channel);
  Socket accept(int peer, Channel channel);
  // Throws ConnectionError if the peer takes no more hops.
  void check(int peer);
  // Why a connection to `peer` has ended: what it told, which may arrive a little later, else what was `seen` of it.
  std::string reason_of_loss(int peer, const std::string& seen);

  // Tells all others that this rank's ring has failed, or was closed.
  void announce(PeerState state, const std::string& reason) noexcept;
  // Raises what everything that waits here or at a socket is interrupted by, and ends the thread. Idempotent.
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
    std::chrono::steady_clock::time_point since;  // its state is this
    std::string reason;                           // why it ended
    Socket notices;
    std::string partial_notice;  // of notices that has not arrived in full
    std::array<Socket, 2> hops;  // connections that it made, by channel
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
  mutable std::mutex mutex_;  // of the peers
  std::condition_variable changed_;
  bool left_ = false;
  std::vector<Peer> peers_;
};

}  // namespace rtp
