#include "transport/cuda_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

CudaTransport::CudaTransport(at::Device device) : CudaTransport(device, std::make_unique<CudaStreams>(device)) {}

CudaTransport::CudaTransport(at::Device device, std::unique_ptr<CudaStreams> streams)
    : Transport(std::move(streams)), device_(device), streams_(static_cast<CudaStreams&>(this->streams())) {}

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
