// The streams of a CUDA transport: the caller's current stream computes, one high-priority stream per channel carries.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <memory>

#include "handles.h"
#include "transport.h"

namespace rtp {

class CudaLanes {
 public:
  explicit CudaLanes(at::Device device)
      : device_(device),
        streams_{c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()),
                 c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())} {}

  cudaStream_t channel(Channel channel) const { return streams_[static_cast<size_t>(channel)].stream(); }
  cudaStream_t compute() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  Mark mark(cudaStream_t stream) const {
    const c10::cuda::CUDAGuard guard(device_);
    auto event = std::make_shared<Event>();
    event->record(stream);
    return event;
  }
  static void block(cudaStream_t stream, const Mark& mark) {
    if (mark) std::static_pointer_cast<Event>(mark)->block(stream);
  }

 private:
  at::Device device_;
  std::array<c10::cuda::CUDAStream, 2> streams_;
};

// A transport whose lanes are CUDA streams: hops of a channel are ordered by their stream, everything else by events.
class CudaTransport : public Transport {
 public:
  explicit CudaTransport(at::Device device) : device_(device), lanes_(device) {}

  Mark mark_compute() override { return lanes_.mark(lanes_.compute()); }
  void order_compute_after(const Mark& mark) override { CudaLanes::block(lanes_.compute(), mark); }
  void order_channel_after(Channel channel, const Mark& mark) override {
    CudaLanes::block(lanes_.channel(channel), mark);
  }
  // Buffers never change channel, so an earlier hop of the same buffer is already ahead in the same stream.
  void order_channel_after_received(Channel, Transfer&) override {}
  void order_channel_after_sent(Channel, Transfer&) override {}

  at::Tensor allocate(Channel, int64_t bytes) override;

 protected:
  // The hop just enqueued on its channel.
  std::unique_ptr<Transfer> transfer(Channel channel);

  at::Device device_;
  CudaLanes lanes_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
