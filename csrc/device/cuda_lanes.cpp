#include "device/cuda_lanes.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "kernels/delay.h"

namespace rtp {
namespace {

thread_local int scoped = -1;  // the device of the innermost DeviceScope of this thread

}  // namespace

cudaStream_t current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

DeviceScope::DeviceScope(at::Device device) {
  if (!device.has_index() || scoped == device.index()) return;
  before_ = c10::cuda::ExchangeDevice(device.index());
  device_ = device.index();
  outer_ = std::exchange(scoped, device_);
}

DeviceScope::~DeviceScope() {
  if (device_ < 0) return;
  scoped = outer_;
  if (before_ != device_) static_cast<void>(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before_)));
}

CudaLanes::CudaLanes(at::Device device) : device_(device) {
  const DeviceScope scope(device);
  for (Stream& stream : streams_) stream = Stream::highest_priority();
  side_ = Stream::with_priority(0);
  int current = 0;
  RTP_CUDA_CHECK(cudaGetDevice(&current));
  RTP_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, current));
}

Mark CudaLanes::mark(cudaStream_t stream) const {
  const DeviceScope scope(device_);
  auto event = events_.take();
  event->record(stream, capture());
  return event;
}

void CudaLanes::begin_pass() {
  capture_.reset();
  capture_ = capture();
  ++passes_;
}

void CudaLanes::end_pass() {
  if (--passes_ == 0) capture_.reset();
}

void CudaLanes::enter() {
  if (entered_++ == 0) scope_.emplace(device_);
}

void CudaLanes::leave() {
  if (--entered_ == 0) scope_.reset();
}

Moment CudaLanes::moment(cudaStream_t stream) const {
  const DeviceScope scope(device_);
  auto event = std::make_shared<Event>(Event::timing());
  event->record(stream);
  return event;
}

void CudaLanes::block(cudaStream_t stream, const Mark& mark, uint64_t within) const {
  if (!mark) return;
  const DeviceScope scope(device_);  // the default stream is that of the current device
  const auto event = std::static_pointer_cast<Event>(mark);
  if (event->capture() == within) event->block(stream);
}

void CudaLanes::select_compute_lane(int lane) {
  if ((lane == 1) == (restore_ != nullptr)) return;
  if (lane == 1) {
    const auto before = c10::cuda::getCurrentCUDAStream(device_.index());
    main_ = before.stream();
    restore_ = std::make_shared<c10::cuda::CUDAStream>(before);
    c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(side_.get(), device_.index()));
  } else {
    c10::cuda::setCurrentCUDAStream(*std::static_pointer_cast<c10::cuda::CUDAStream>(restore_));
    restore_ = nullptr;
  }
}

double CudaLanes::seconds(const Moment& from, const Moment& to) {
  const DeviceScope scope(device_);
  return std::static_pointer_cast<Event>(to)->since(*std::static_pointer_cast<Event>(from));
}

void CudaLanes::delay(Channel channel, std::chrono::microseconds time) {
  const DeviceScope scope(device_);
  RTP_CUDA_CHECK(static_cast<cudaError_t>(launch_delay(time.count(), this->channel(channel))));
}

}  // namespace rtp
