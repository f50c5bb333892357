// A transport on CUDA streams: the stream of a channel orders its hops, and events order everything else.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>

#include "device/cuda_streams.h"
#include "transport/transport.h"

namespace rtp {

class CudaTransport : public Transport {
 public:
  explicit CudaTransport(at::Device device);

  at::Tensor allocate(Channel, int64_t bytes) override;
  void release(Channel, const at::Tensor& slot) override;

  // Throws if the transport has failed.
  virtual void check() const {}

 protected:
  // Returns the transfer of a hop whose ends are the events `sent` and `received` of its channel.
  std::unique_ptr<Transfer> transfer(StreamEvent sent, StreamEvent received);

  at::Device device_;
  CudaStreams& streams_;

 private:
  CudaTransport(at::Device device, std::unique_ptr<CudaStreams> streams);
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
