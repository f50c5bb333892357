// A transport on CUDA streams: a high-priority stream for each channel orders its hops, and events order everything
// else.
#pragma once

#ifdef RTP_WITH_CUDA

#include <array>
#include <memory>

#include "device/cuda_streams.h"
#include "transport/transport.h"

namespace rtp {

class CudaTransport : public Transport {
 public:
  // `streams`: those of the computes, of the same device; null: new ones.
  explicit CudaTransport(at::Device device, std::shared_ptr<CudaStreams> streams = nullptr);

  at::Tensor allocate(Channel, int64_t bytes) override;
  void release(Channel, const at::Tensor& slot) override;

  void order_hops_after(Channel channel, const StreamEvent& event) override;
  void order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) override;
  Moment moment(const Hop& hop) override { return streams_.moment(stream(hop.channel)); }
  void delay(const Hop& hop, std::chrono::microseconds time) override;

  // Throws if the transport has failed.
  virtual void check() const {}

 protected:
  // The stream of the hops of a channel.
  cudaStream_t stream(Channel channel) const { return hop_streams_[static_cast<size_t>(channel)].get(); }
  // The stream on which the hops of a channel use a memory, or announce to a peer that it may; by default the
  // channel's.
  cudaStream_t& user(Channel channel, HopMemory memory) {
    return users_[static_cast<size_t>(channel)][static_cast<size_t>(memory)];
  }

  // Returns the transfer of a hop whose ends are the events `sent` and `received` of its channel.
  std::unique_ptr<Transfer> transfer(StreamEvent sent, StreamEvent received);

  at::Device device_;
  CudaStreams& streams_;

 private:
  std::array<Stream, 2> hop_streams_;                   // owned, because torch's pool gives one stream to several users
  std::array<std::array<cudaStream_t, 2>, 2> users_{};  // by channel and memory
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
