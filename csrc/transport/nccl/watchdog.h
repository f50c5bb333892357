// Supervision of hops that the host does not wait for. A thread looks for hops that outlast the timeout and for errors
// that are reported asynchronously, and then has the transport give up, so that no stream is stuck for ever.
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
  enum class Kind { lost, nccl, other };  // becomes RingTimeout, NcclError or RotationError
  Kind kind;
  std::string reason;
};

class Watchdog {
 public:
  // What a transport does for its watchdog. Called on any thread, one call at a time; must not throw.
  struct Duties {
    // Looks for an error that was reported asynchronously, or that another rank told of. `awaited`: the ranks that the
    // oldest hops are waiting for, kAnyRank among them.
    std::function<std::optional<Failure>(const std::vector<int>& awaited)> look;
    // Gives up: lets what is enqueued come to an end. True: to be called again until every hop has ended.
    std::function<bool(const Failure&)> give_up;
  };

  static constexpr int kAnyRank = -1;  // of a pass as a whole: nobody knows whom it waits for

  Watchdog(at::Device device, std::chrono::milliseconds timeout, Duties duties);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { stop(); }

  // Supervises the hop just enqueued, which ends at `done`: a mark outside captures.
  void watch(const Hop& hop, const StreamEvent& done);

  // Throws once something has failed.
  void check() const;
  bool failed() const;

  // Fails, and gives up before it returns, unless something has failed already.
  void fail(Failure failure) noexcept;

  // Waits until the supervised hops have ended, for `longest`. Returns whether they have.
  bool drain(std::chrono::milliseconds longest) noexcept;

  // Ends the thread. Idempotent. A transport stops its watchdog before it takes down what the duties use.
  void stop() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    Hop hop;  // without its spans
    Clock::time_point since;
    StreamEvent done;
  };

  void run() noexcept;
  std::optional<Failure> look();
  std::optional<Failure> overdue();
  void forget_ended();

  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  const Duties duties_;
  mutable std::mutex mutex_;
  std::mutex duty_;  // one duty at a time; taken before `mutex_`
  std::condition_variable wake_;
  bool stopping_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> again_ = false;             // give_up wants another call for as long as a hop has not ended
  std::array<std::deque<Pending>, 2> pending_;  // of each channel: hops whose end has not been seen, oldest first
  std::thread thread_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
