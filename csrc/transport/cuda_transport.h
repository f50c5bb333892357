// A transport whose lanes are CUDA streams: hops of a channel are ordered by their stream, everything else by events.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>

#include "device/cuda_streams.h"
#include "transport/transport.h"

namespace rtp {

class CudaTransport : public Transport {
 public:
  explicit CudaTransport(at::Device device);

  // Buffers never change channel, so an earlier hop of the same buffer is already ahead in the same stream.
  void order_channel_after_received(Channel, Transfer&) override {}
  void order_channel_after_sent(Channel, Transfer&) override {}

  at::Tensor allocate(Channel, int64_t bytes) override;
  void release(Channel, const at::Tensor& slot) override;

  // Throws once the transport has failed.
  virtual void check() const {}

 protected:
  // The hop whose ends `sent` and `received` mark in its channel.
  std::unique_ptr<Transfer> transfer(StreamEvent sent, StreamEvent received);

  at::Device device_;
  CudaStreams& lanes_;

 private:
  CudaTransport(at::Device device, std::unique_ptr<CudaStreams> streams);
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
