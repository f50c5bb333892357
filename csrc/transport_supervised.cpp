#include "transport_supervised.h"

namespace rtp {
namespace {

constexpr auto kGivingUp = std::chrono::seconds(2);  // what has been given up ends in milliseconds, if it ends

NcclCommunicators connect(const RingEnd& end, const std::vector<std::string>& ids, const CommunicatorOptions& options) {
  const DeviceScope scope(end.device);
  return NcclCommunicators(ids, end.rank, end.ranks, options, end.timeout);
}

}  // namespace

SupervisedTransport::SupervisedTransport(const RingEnd& end, const std::vector<std::string>& ids,
                                         const CommunicatorOptions& options)
    : CudaTransport(end.device), end_(end), communicators_(connect(end, ids, options)) {}

void SupervisedTransport::start() {
  watchdog_ = std::make_unique<Watchdog>(end_.device, end_.timeout,
                                         Watchdog::Duties{[this] { return look(); },
                                                          [this](const Failure&) {
                                                            const DeviceScope scope(end_.device);
                                                            return give_up();
                                                          }});
}

std::unique_ptr<Transfer> SupervisedTransport::post(const Hop& hop) {
  const DeviceScope scope(device_);
  watchdog_->check();
  cudaStream_t stream = lanes_.channel(hop.channel);
  try {
    enqueue(hop, stream);
  } catch (const RotationError&) {
    watchdog_->check();  // why the watchdog gave up says more than that it did
    throw;
  }
  const Mark done = lanes_.mark(stream);
  watchdog_->watch(hop, stream, done);
  return transfer(done);
}

std::optional<Failure> SupervisedTransport::look() {
  if (auto error = communicators_.asynchronous_error()) return Failure{Failure::Kind::nccl, *error};
  return std::nullopt;
}

bool SupervisedTransport::give_up() noexcept {
  communicators_.abort();
  return false;
}

void SupervisedTransport::abort(const std::string& reason) noexcept {
  watchdog_->fail({Failure::Kind::other, reason});
  watchdog_->drain(kGivingUp);
}

void SupervisedTransport::close() {
  const DeviceScope scope(device_);
  watchdog_->drain(end_.timeout);
  watchdog_->check();
  take_down();
  watchdog_->stop();
  communicators_.finalize();
}

void SupervisedTransport::drop() noexcept {
  if (!watchdog_->drain(end_.timeout)) {
    abort("the ring was dropped");
    return;
  }
  watchdog_->stop();
  communicators_.abort();
}

void SupervisedTransport::supervise(const Hop& hop, int peer, cudaStream_t stream) {
  Hop part = hop;
  part.from = peer;
  watchdog_->watch(part, stream, lanes_.mark(stream));
}

}  // namespace rtp
