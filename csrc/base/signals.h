// Handlers of signals during waits of the caller's thread: what one raises, such as KeyboardInterrupt, ends the wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace rtp {

// Part of an exception that a handler has raised.
class Interrupted {
 public:
  virtual ~Interrupted() = default;
  static constexpr const char* kReason = "a signal interrupted this rank";
};

// Runs the handlers of signals that have come; throws Interrupted if one raises. The bindings set it; null elsewhere.
inline void (*signal_handlers)() = nullptr;

inline constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // of looks for signals during a wait

// The caller holds no lock, since a handler may use the ring.
inline void check_signals() {
  if (signal_handlers != nullptr) signal_handlers();
}

// Waits as `condition` does, and runs handlers meanwhile, without the lock.
template <typename Ready>
bool wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                std::chrono::steady_clock::time_point deadline, Ready ready) {
  while (true) {
    const auto now = std::chrono::steady_clock::now();
    if (condition.wait_until(lock, std::min(deadline, now + kSignalInterval), ready)) return true;
    if (now >= deadline) return false;
    lock.unlock();
    check_signals();
    lock.lock();
  }
}

}  // namespace rtp
