// How long a thread polls for a change by another rank before it sleeps.
#pragma once

#include <algorithm>
#include <chrono>

namespace rtp {

// How long one thread polls a flag before it sleeps: as long as most of its recent waits took, if that is shorter than
// the wakeup of a thread. Longer waits cost the core of another rank, and do not poll.
class Polling {
 public:
  std::chrono::nanoseconds time() const { return mean_ > kLongest ? kShortest : std::max(2 * mean_, kShortest); }
  void add(std::chrono::nanoseconds wait) { mean_ += (std::min(wait, 4 * kLongest) - mean_) / 8; }

 private:
  static constexpr std::chrono::nanoseconds kShortest = std::chrono::microseconds(5);
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::microseconds(100);

  std::chrono::nanoseconds mean_ = kShortest;
};

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace rtp
