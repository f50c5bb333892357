// Posts the hops of one ring, and counts them.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <random>

#include "engine/slots.h"
#include "engine/trace.h"
#include "transport/transport.h"

namespace rtp {

class Hops {
 public:
  Hops(std::shared_ptr<Transport> transport, Trace& trace) : transport_(std::move(transport)), trace_(trace) {}

  // Posts a hop after whoever wrote its source, and whoever uses its target, and enters it in both. `traced`: the event
  // to time.
  std::shared_ptr<Transfer> post(const Hop& hop, Usage& source, Usage& target, const EventHandle& traced);

  // For race tests: holds up every hop by a random time of at most this.
  void set_delay(std::chrono::microseconds most) { delay_ = most; }

  int64_t count(Channel channel) const { return counts_[static_cast<size_t>(channel)]; }
  int64_t bytes_sent(Channel channel) const { return bytes_[static_cast<size_t>(channel)]; }

 private:
  std::shared_ptr<Transport> transport_;
  Trace& trace_;
  std::chrono::microseconds delay_{0};
  std::minstd_rand random_{std::random_device{}()};
  std::array<int64_t, 2> counts_{};
  std::array<int64_t, 2> bytes_{};
};

}  // namespace rtp
