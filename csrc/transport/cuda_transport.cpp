#include "transport/cuda_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "kernels/delay.h"

namespace rtp {
namespace {

class StreamTransfer : public Transfer {
 public:
  StreamTransfer(const CudaTransport& transport, CudaStreams& streams, StreamEvent sent, StreamEvent received)
      : transport_(transport), streams_(streams), sent_(std::move(sent)), received_(std::move(received)) {}
  void wait_received() override { wait(received_); }
  void wait_sent() override { wait(sent_); }
  StreamEvent event(End end) const override { return end == End::received ? received_ : sent_; }

 private:
  void wait(const StreamEvent& end) {
    streams_.order_compute_after(end);
    transport_.check();
  }

  const CudaTransport& transport_;
  CudaStreams& streams_;
  StreamEvent sent_, received_;
};

}  // namespace

CudaTransport::CudaTransport(at::Device device, std::shared_ptr<CudaStreams> streams)
    : Transport(streams ? std::move(streams) : std::make_shared<CudaStreams>(device)),
      device_(device),
      streams_(static_cast<CudaStreams&>(this->streams())) {
  const DeviceScope scope(device);
  for (size_t channel = 0; channel < hop_streams_.size(); ++channel) {
    hop_streams_[channel] = Stream::highest_priority();
    users_[channel].fill(hop_streams_[channel].get());
  }
}

void CudaTransport::order_hops_after(Channel channel, const StreamEvent& event) {
  const auto& [source, target] = users_[static_cast<size_t>(channel)];
  streams_.order_after(source, event);
  if (target != source) streams_.order_after(target, event);
}

void CudaTransport::order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) {
  streams_.order_after(user(hop.channel, memory), event);
}

void CudaTransport::delay(const Hop& hop, std::chrono::microseconds time) {
  const DeviceScope scope(device_);
  RTP_CUDA_CHECK(static_cast<cudaError_t>(launch_delay(time.count(), stream(hop.channel))));
}

std::unique_ptr<Transfer> CudaTransport::transfer(StreamEvent sent, StreamEvent received) {
  return std::make_unique<StreamTransfer>(*this, streams_, std::move(sent), std::move(received));
}

at::Tensor CudaTransport::allocate(Channel, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

// Without this, the allocator could reuse the memory on its original stream at once; all uses are ordered before the
// current stream.
void CudaTransport::release(Channel, const at::Tensor& slot) {
  at::Tensor used = slot;
  if (used.is_cuda()) used.record_stream(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

}  // namespace rtp
