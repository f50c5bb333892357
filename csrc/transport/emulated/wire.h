// A wire of limited rate from a host to itself, so that one process measures how hops overlap with products.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/streams.h"
#include "transport/transport.h"

namespace rtp {

class Wire {
 public:
  struct Rate {
    double bytes_per_second, seconds_per_message;
  };
  // Reads `wire:BYTES_PER_SECOND[:SECONDS_PER_MESSAGE]`. Throws std::invalid_argument for anything else.
  static Rate rate_of(const std::string& link);

  // Bytes to copy; a piece without a source is filled with zeros.
  struct Piece {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  struct Message {
    std::vector<Piece> pieces;
    HostClock::duration takes;
    HostClock::time_point arrived;
    bool done = false;
  };

  explicit Wire(Rate rate) : rate_(rate), thread_([this] { run(); }) {}
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  ~Wire();

  // Messages follow one another: each takes seconds_per_message and its bytes over the rate. The memory of both ends is
  // in use until it has arrived.
  std::shared_ptr<Message> send(std::vector<Piece> pieces);
  void wait(Message& message);
  // Returns the time at which a message arrived; none before that.
  Moment arrived(const Message& message);
  void close();  // messages on the way do not arrive any more

 private:
  void run();

  const Rate rate_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Message>> waiting_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace rtp
