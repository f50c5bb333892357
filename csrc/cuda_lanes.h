// The streams of a CUDA transport: the caller's current stream computes, one high-priority stream per channel carries.
// The only place where transports meet torch's CUDA; everything else of theirs calls the CUDA runtime and NCCL.
#pragma once

#ifdef RTP_WITH_CUDA

#include <array>
#include <memory>

#include "handles.h"
#include "transport.h"

namespace rtp {

// torch's current stream of a device.
cudaStream_t current_stream(at::Device device);

// Makes `device` the calling thread's current one for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(at::Device device);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope();

 private:
  int before_ = 0;
  bool changed_ = false;
};

class CudaLanes {
 public:
  explicit CudaLanes(at::Device device);

  cudaStream_t channel(Channel channel) const { return streams_[static_cast<size_t>(channel)].get(); }
  cudaStream_t compute() const { return current_stream(device_); }

  Mark mark(cudaStream_t stream) const;
  static void block(cudaStream_t stream, const Mark& mark) {
    if (mark) std::static_pointer_cast<Event>(mark)->block(stream);
  }

 private:
  at::Device device_;
  std::array<Stream, 2> streams_;  // of our own: torch's pool hands the same stream to several users
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
  void delay(Channel channel, std::chrono::microseconds time) override;

  // Throws once the transport has failed.
  virtual void check() const {}

 protected:
  // The hop that ends where `done` marks its channel.
  std::unique_ptr<Transfer> transfer(Mark done);

  at::Device device_;
  CudaLanes lanes_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
