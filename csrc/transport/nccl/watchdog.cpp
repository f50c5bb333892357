#include "transport/nccl/watchdog.h"

namespace rtp {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(20);
// Each call of give_up ends one wait per stream, and dozens of layers may be enqueued.
constexpr auto kGivingUpInterval = std::chrono::microseconds(100);

bool ended(const StreamEvent& event) { return std::static_pointer_cast<Event>(event)->reached(); }

}  // namespace

Watchdog::Watchdog(at::Device device, std::chrono::milliseconds timeout, int first, Callbacks callbacks)
    : device_(device), timeout_(timeout), first_(first), callbacks_(std::move(callbacks)), thread_([this] { run(); }) {}

void Watchdog::watch(const Hop& hop, const StreamEvent& done) {
  Pending pending{hop, Clock::now(), done};
  pending.hop.send.clear();
  pending.hop.receive.clear();
  const std::lock_guard lock(mutex_);
  pending_[static_cast<size_t>(hop.channel)].push_back(std::move(pending));
}

void Watchdog::check() const {
  const std::lock_guard lock(mutex_);
  if (!failure_) return;
  if (failure_->kind == Failure::Kind::lost) throw RingTimeout(failure_->reason);
  if (failure_->kind == Failure::Kind::nccl) throw NcclError(failure_->reason);
  throw RotationError(failure_->reason);
}

bool Watchdog::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

void Watchdog::fail(Failure failure) noexcept {
  try {
    const std::lock_guard callback_lock(callback_mutex_);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = failure;
    }
    repeat_give_up_ = callbacks_.give_up(failure);
    wake_.notify_all();
  } catch (...) {  // out of memory for a message: the neighbours detect the failure by their timeout
  }
}

// Drops the hops that have ended. The timeout of a hop starts when the previous hop of its stream has ended, because
// hops may be enqueued far ahead.
void Watchdog::forget_ended() {
  for (auto& hops : pending_) {
    while (!hops.empty() && ended(hops.front().done)) {
      hops.pop_front();
      if (!hops.empty()) hops.front().since = Clock::now();
    }
  }
}

std::optional<Failure> Watchdog::find_timeout() {
  const std::lock_guard lock(mutex_);
  forget_ended();
  for (const auto& hops : pending_) {
    if (hops.empty()) continue;
    const std::chrono::duration<double> waited = Clock::now() - hops.front().since;
    if (waited < timeout_) continue;
    const Hop& hop = hops.front().hop;
    const std::string who = hop.from == kAnyRank ? "a rank" : concat("rank ", first_ + hop.from);
    return Failure{Failure::Kind::lost, concat(hop.describe(), ": ", who, " of the ring did not answer (waited ",
                                               waited.count(), " s): the hop did not end")};
  }
  return std::nullopt;
}

// Returns a failure found by the transport, prefixed with the oldest hop that has not ended.
std::optional<Failure> Watchdog::find_failure() {
  std::vector<int> awaited;
  std::string oldest;
  {
    const std::lock_guard lock(mutex_);
    forget_ended();
    for (const auto& hops : pending_) {
      if (hops.empty()) continue;
      awaited.insert(awaited.end(), {hops.front().hop.from, hops.front().hop.to});
      if (oldest.empty()) oldest = hops.front().hop.describe();
    }
  }
  const std::lock_guard callback_lock(callback_mutex_);
  auto failure = callbacks_.find_failure(awaited);
  if (failure && !oldest.empty()) failure->reason = concat(oldest, ": ", failure->reason);
  return failure;
}

void Watchdog::run() noexcept {
  try {
    const DeviceScope scope(device_);
    // captures of other threads do not forbid queries here
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    RTP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const bool waits = repeat_give_up_ && !(pending_[0].empty() && pending_[1].empty());
      wake_.wait_for(lock, waits ? std::chrono::microseconds(kGivingUpInterval) : kPollInterval);
      if (stopping_) break;
      const bool failed = failure_.has_value();
      lock.unlock();
      if (!failed) {
        auto failure = find_failure();
        if (!failure) failure = find_timeout();
        if (failure) fail(std::move(*failure));
      } else if (repeat_give_up_ && !drain(std::chrono::milliseconds(0))) {
        // Covers hops that were being enqueued, perhaps into a full queue, while the others ended.
        const std::lock_guard callback_lock(callback_mutex_);
        repeat_give_up_ = callbacks_.give_up(*failure_);
      }
      lock.lock();
    }
  } catch (const std::exception& error) {
    fail({Failure::Kind::other, concat("its watchdog failed: ", error.what())});
  } catch (...) {
    fail({Failure::Kind::other, "its watchdog failed"});
  }
}

bool Watchdog::drain(std::chrono::milliseconds longest) noexcept {
  try {
    const DeviceScope scope(device_);
    const auto deadline = Clock::now() + longest;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        forget_ended();
        if (pending_[0].empty() && pending_[1].empty()) return true;
      }
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (...) {
    return false;
  }
}

void Watchdog::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace rtp
