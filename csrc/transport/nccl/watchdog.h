// Supervision of asynchronous hops. A thread detects hops that exceed the timeout and asynchronous errors, and then
// makes the transport give up, so that no stream blocks forever.
#pragma once

#ifdef RTP_WITH_CUDA

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda_streams.h"
#include "transport/transport.h"

namespace rtp {

struct Failure {
  enum class Kind { lost, nccl, other };  // thrown as RingTimeout, NcclError or RotationError
  Kind kind;
  std::string reason;
};

class Watchdog {
 public:
  // Callbacks into the transport. Called on any thread, one at a time; must not throw.
  struct Callbacks {
    // Returns an asynchronous error, or the failure of another rank. `awaited`: the ranks that the oldest hops wait
    // for; may contain kAnyRank.
    std::function<std::optional<Failure>(const std::vector<int>& awaited)> find_failure;
    // Makes enqueued work end. Returns true if it must be called again until every hop has ended.
    std::function<bool(const Failure&)> give_up;
  };

  static constexpr int kAnyRank = -1;  // the peer of a whole graph, whose awaited rank is unknown

  // `first`: for messages, the rank in the ring of rank 0.
  Watchdog(at::Device device, std::chrono::milliseconds timeout, int first, Callbacks callbacks);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { stop(); }

  // Supervises the hop just enqueued, which ends at the event `done`, recorded outside captures.
  void watch(const Hop& hop, const StreamEvent& done);

  // Throws if a failure has occurred.
  void check() const;
  bool failed() const;

  // Records a failure and gives up before it returns; no effect after an earlier failure.
  void fail(Failure failure) noexcept;

  // Waits at most `longest` for the supervised hops to end. Returns whether they have ended.
  bool drain(std::chrono::milliseconds longest) noexcept;

  // Stops the thread. Idempotent. A transport stops its watchdog before it releases objects that the callbacks use.
  void stop() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    Hop hop;  // send and receive are empty
    Clock::time_point since;
    StreamEvent done;
  };

  void run() noexcept;
  std::optional<Failure> find_failure();
  std::optional<Failure> find_timeout();
  void forget_ended();

  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  const int first_;
  const Callbacks callbacks_;
  mutable std::mutex mutex_;
  std::mutex callback_mutex_;  // one callback at a time; locked before `mutex_`
  std::condition_variable wake_;
  bool stopping_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> repeat_give_up_ = false;    // call give_up again while a hop has not ended
  std::array<std::deque<Pending>, 2> pending_;  // by channel: hops not known to have ended, oldest first
  std::thread thread_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
