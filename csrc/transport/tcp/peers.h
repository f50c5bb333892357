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

#include "base/siphash.h"
#include "schedule/schedule.h"
#include "transport/peer_state.h"
#include "transport/tcp/socket.h"

namespace rtp {

// Every two ranks share a connection for notices: that a rank closes its ring, or why it failed. Hops and pulls use
// separate connections, one per channel and direction, which one end opens before the first of them. A thread accepts
// connections and reads notices; it sleeps while there are none. A rank that has left stays away.
//
// Both ends of a connection prove that they know the key of the ring, by a hash of numbers that each has drawn for this
// connection: what was overheard proves nothing later. The listener keeps few connections without a proof, each for
// a few seconds, and starts no thread for them.
class Peers {
 public:
  // Listens at `host`, an address of this host. The thread calls `on_failure` when a peer's ring has failed.
  Peers(int rank, int ranks, const std::string& host, std::function<void(const Lost&)> on_failure);
  ~Peers();

  // Returns the address at which this rank listens, and the key of the ring if this is rank 0.
  std::string address() const;
  // Connects to all ranks, given the address of each, in half the timeout, so that the caller can still tell others.
  // Throws RotationError that names an unreachable rank.
  void join(const std::vector<std::string>& addresses, std::chrono::milliseconds timeout);

  // Opens this rank's connection of a channel to `peer`. Throws ConnectionError if the peer has left or is none,
  // Stopped if `stop` is raised, and RingTimeout.
  Socket connect(int peer, Channel channel, const Socket& stop, std::chrono::milliseconds timeout);
  // Returns the newest connection of a channel that `peer` has opened, once each. Throws ConnectionError if the peer
  // has left, and Stopped if this rank leaves.
  Socket accept(int peer, Channel channel);
  // Throws ConnectionError if the peer accepts no more hops.
  void check(int peer);
  // Returns why a connection to `peer` has ended: the reason in its notice, which may arrive slightly later, otherwise
  // `seen`.
  std::string reason_of_loss(int peer, const std::string& seen);
  // Returns why this rank accepts no connections at present; empty if it does.
  std::string problem();
  // Returns a rank and its address, for errors.
  std::string describe(int peer) const;

  // Sends all other ranks the notice that this rank's ring has failed or was closed.
  void announce(PeerState state, const std::string& reason) noexcept;
  // Interrupts all waits here and on sockets, and ends the thread. Idempotent.
  void leave() noexcept;
  const Socket& stop() const { return stop_; }

 private:
  struct Hello;
  struct Challenge;
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
  void accept_all(std::list<PendingConnection>& pending);
  void read_hellos(std::list<PendingConnection>& pending);
  bool answer(PendingConnection& connection) const;
  void admit(const Hello& hello, Socket socket);
  void read_notice(int rank);
  void set_state(int rank, PeerState state, const std::string& reason = "");
  Socket open(int peer, uint32_t purpose, const Socket& stop, std::chrono::milliseconds timeout) const;
  uint64_t proof(bool of_opener, const Hello& hello, uint64_t drawn) const;
  std::string lost_reason(int peer) const;

  const int rank_;
  const int ranks_;
  const std::string host_;
  const std::function<void(const Lost&)> on_failure_;
  SipKey key_;
  Socket stop_;
  Socket listener_;
  std::thread watcher_;
  mutable std::mutex mutex_;  // guards the peers
  std::condition_variable changed_;
  bool left_ = false;
  std::string problem_;
  std::vector<Peer> peers_;
};

}  // namespace rtp
