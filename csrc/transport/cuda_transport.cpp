#include "transport/cuda_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace rtp {
namespace {

class StreamTransfer : public Transfer {
 public:
  StreamTransfer(const CudaTransport& transport, CudaStreams& streams, StreamEvent sent, StreamEvent received,
                 std::function<StreamEvent()> finish_sending)
      : transport_(transport),
        streams_(streams),
        sent_(std::move(sent)),
        received_(std::move(received)),
        finish_sending_(std::move(finish_sending)) {}
  void wait_received() override { wait(received_); }
  void wait_sent() override { wait(event(End::sent)); }
  StreamEvent event(End end) override {
    if (end == End::sent && finish_sending_) sent_ = std::exchange(finish_sending_, nullptr)();
    return end == End::sent ? sent_ : received_;
  }

 private:
  void wait(const StreamEvent& end) {
    streams_.order_compute_after(end);
    transport_.check();
  }

  const CudaTransport& transport_;
  CudaStreams& streams_;
  StreamEvent sent_, received_;
  std::function<StreamEvent()> finish_sending_;
};

}  // namespace

CudaTransport::CudaTransport(at::Device device) : CudaTransport(device, std::make_unique<CudaStreams>(device)) {}

CudaTransport::CudaTransport(at::Device device, std::unique_ptr<CudaStreams> streams)
    : Transport(std::move(streams)), device_(device), streams_(static_cast<CudaStreams&>(this->streams())) {}

std::unique_ptr<Transfer> CudaTransport::transfer(Ends ends) {
  return std::make_unique<StreamTransfer>(*this, streams_, std::move(ends.sent), std::move(ends.received),
                                          std::move(ends.finish_sending));
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
