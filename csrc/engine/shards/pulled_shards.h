// Shards that a rank pulls from their owners over sockets: threads of the owner answer, also while it computes.
//
// [Note: pulled shards]
// A forward alone needs no partner: a rank that has more or fewer batches than others asks the owners for what it
// reads, and the order of its pulls is its own affair. What binds the ranks is the update: it waits for running
// forwards on every rank, then all of them write, so that a pull gets shards of one version. Connections are those of
// the transport `tcp` (Peers): proven by the key of the ring, and with notice of a rank that has left or died.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/shards/host_shards.h"
#include "transport/tcp/peers.h"

namespace rtp {

// One connection to every other rank, made by the first pull from it, and one thread for every rank that pulls from
// this one. A thread of this rank runs its pulls. Where the next pull is from the same owner, it is asked for while the
// running one arrives, so that the owner sends without a pause. A pull fails with RotationError that names the owner if
// the owner has ended or what arrives is not what it sent, and with RingTimeout if it sends nothing for the timeout.
class PulledShards : public HostShards {
 public:
  // `host`: the address at which other ranks reach this one.
  PulledShards(int rank, int ranks, int64_t bytes, const std::string& host, std::chrono::milliseconds timeout);
  ~PulledShards() override { close(); }

  std::string address() const override;
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override;
  std::shared_ptr<Pull> pull(const std::vector<size_t>& parameters, int owner,
                             const std::vector<at::Tensor>& targets) override;
  void close() noexcept override;

 protected:
  struct Task {
    std::vector<size_t> parameters;
    int owner;
    std::vector<at::Tensor> targets;
  };

  // Fills the targets of a pull, on the thread of pulls. Throws Stopped if it was given up.
  virtual void fetch(const Task& task) {
    receive(task, [](size_t) {});
  }
  // Fills them from the owner. Calls `progress` with the number of bytes that have arrived so far.
  void receive(const Task& task, const std::function<void(size_t)>& progress);
  // Whether a pull may be asked for before its turn.
  virtual bool asks_ahead() const { return true; }
  // Raised when the running pull is given up, and when the ring ends.
  const Socket& interrupt() const { return interrupt_; }

 private:
  struct Owner {
    Incoming connection;  // the thread of pulls makes it, ends it and receives
    bool left = false;    // a pull that was asked for has been dropped: its bytes will arrive
  };
  struct Request;
  struct Answer;
  class Queued;

  void answer(int peer);
  void serve(Incoming& connection);
  void run();
  std::vector<Request> requests_of(const Task& task) const;
  void ask(Queued& pull);
  void leave(int owner);
  void wait(Queued& pull);
  void drop(Queued& pull) noexcept;

  const std::chrono::milliseconds timeout_;
  Socket interrupt_;
  Peers peers_;
  std::vector<Owner> owners_;                  // by rank; requests and ends of connections need the mutex
  std::mutex mutex_;                           // guards what follows
  std::deque<std::shared_ptr<Queued>> queue_;  // the first one is running or will be next
  std::condition_variable queued_, ended_;
  bool closing_ = false;
  std::vector<std::thread> answering_;
  std::thread pulling_;
};

}  // namespace rtp
