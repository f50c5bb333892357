// Shards that a rank pulls from their owners over sockets: threads of the owner answer, also while it computes.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/shards/shard_source.h"
#include "transport/tcp/socket.h"

namespace rtp {

// One connection to every other rank, made by the first pull from it, and one thread for every connection of another
// rank. A pull fails with RotationError that names the owner if the owner has ended, and with RingTimeout if it sends
// nothing for the timeout.
class PulledShards : public ShardSource {
 public:
  // `host`: the address at which other ranks reach this one.
  PulledShards(int rank, int ranks, int64_t bytes, const std::string& host, std::chrono::milliseconds timeout);
  ~PulledShards() override { close(); }

  std::string address() const override;
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override;
  bool maps() const override { return false; }
  void pull(const std::vector<at::Tensor>& local, int owner, const std::vector<at::Tensor>& targets) override;
  void close() noexcept override;

 private:
  struct Owner {
    std::string host;
    int port = 0;
    uint64_t number = 0;
    int64_t bytes = 0;
    std::vector<int64_t> offsets;
    std::mutex mutex;  // one pull at a time
    Socket socket;
  };

  void accept();
  void answer(const Socket& socket);
  void receive(Owner& owner, std::byte* data, size_t bytes) const;

  const std::string host_;
  const std::chrono::milliseconds timeout_;
  Socket stop_;
  Socket listener_;
  std::vector<std::unique_ptr<Owner>> owners_;  // by rank
  std::mutex mutex_;                            // guards the threads
  std::list<std::thread> answering_;
  std::thread accepting_;
};

}  // namespace rtp
