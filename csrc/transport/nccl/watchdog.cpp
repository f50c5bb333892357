#include "transport/nccl/watchdog.h"

namespace rtp {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(20);
// What has been given up ends one wait at a time, of which dozens of layers may be enqueued.
constexpr auto kGivingUpInterval = std::chrono::microseconds(100);

bool ended(const StreamEvent& event) { return std::static_pointer_cast<Event>(event)->reached(); }

}  // namespace

Watchdog::Watchdog(at::Device device, std::chrono::milliseconds timeout, Duties duties)
    : device_(device), timeout_(timeout), duties_(std::move(duties)), thread_([this] { run(); }) {}

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
    const std::lock_guard duty(duty_);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = failure;
    }
    again_ = duties_.give_up(failure);
    wake_.notify_all();
  } catch (...) {  // no memory for a message: the timeout of the neighbours has to do
  }
}

// Drops the hops that have ended. The time of a hop runs from when the one before it in its stream ended: what is
// enqueued far ahead is not late.
void Watchdog::forget_ended() {
  for (auto& hops : pending_) {
    while (!hops.empty() && ended(hops.front().done)) {
      hops.pop_front();
      if (!hops.empty()) hops.front().since = Clock::now();
    }
  }
}

std::optional<Failure> Watchdog::overdue() {
  const std::lock_guard lock(mutex_);
  forget_ended();
  for (const auto& hops : pending_) {
    if (hops.empty()) continue;
    const std::chrono::duration<double> waited = Clock::now() - hops.front().since;
    if (waited < timeout_) continue;
    const Hop& hop = hops.front().hop;
    const std::string who = hop.from == kAnyRank ? "a rank" : concat("rank ", hop.from);
    return Failure{Failure::Kind::lost, concat(hop.describe(), ": ", who, " of the ring did not answer (waited ",
                                               waited.count(), " s): the hop did not end")};
  }
  return std::nullopt;
}

// What the transport found, with the oldest hop that has not ended.
std::optional<Failure> Watchdog::look() {
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
  const std::lock_guard duty(duty_);
  auto failure = duties_.look(awaited);
  if (failure && !oldest.empty()) failure->reason = concat(oldest, ": ", failure->reason);
  return failure;
}

void Watchdog::run() noexcept {
  try {
    const DeviceScope scope(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;  // a capture elsewhere may not forbid queries here
    RTP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const bool waits = again_ && !(pending_[0].empty() && pending_[1].empty());
      wake_.wait_for(lock, waits ? std::chrono::microseconds(kGivingUpInterval) : kPollInterval);
      if (stopping_) break;
      const bool failed = failure_.has_value();
      lock.unlock();
      if (!failed) {
        auto failure = look();
        if (!failure) failure = overdue();
        if (failure) fail(std::move(*failure));
      } else if (again_ && !drain(std::chrono::milliseconds(0))) {
        // Also of hops that were being enqueued, perhaps into a full queue, while the others ended.
        const std::lock_guard duty(duty_);
        again_ = duties_.give_up(*failure_);
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
