// The streams of a CUDA transport: the caller's current stream computes, one high-priority stream per channel carries.
// The only place where transports meet torch's CUDA; everything else of theirs calls the CUDA runtime and NCCL.
#pragma once

#ifdef RTP_WITH_CUDA

#include <array>
#include <memory>

#include "base/handles.h"
#include "transport/transport.h"

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
  // That of the caller's stream.
  uint64_t capture() const { return capture_of(restore_ ? main_ : compute()); }

  Mark mark(cudaStream_t stream) const;
  Moment moment(cudaStream_t stream) const;
  // What was enqueued outside a capture has ended before it begins, and what a graph contains is ordered where the
  // graph is launched: across that border no stream may, or need, wait for a mark. `within`: the capture that marks of
  // this pass belong to, also for streams that have not joined it yet.
  void block(cudaStream_t stream, const Mark& mark, uint64_t within) const;

  // Lets torch's current stream be that of a lane: 0, the caller's, or 1, one of our own.
  void select(int lane);

 private:
  at::Device device_;
  std::array<Stream, 2> streams_;  // of our own: torch's pool hands the same stream to several users
  Stream side_;
  cudaStream_t main_ = nullptr;    // the caller's stream, while lane 1 is selected
  std::shared_ptr<void> restore_;  // the same as torch knows it; null while lane 0 is selected
};

// A transport whose lanes are CUDA streams: hops of a channel are ordered by their stream, everything else by events.
class CudaTransport : public Transport {
 public:
  explicit CudaTransport(at::Device device);

  Mark mark_compute() override { return lanes_.mark(lanes_.compute()); }
  void order_compute_after(const Mark& mark) override { lanes_.block(lanes_.compute(), mark, capture()); }
  void order_channel_after(Channel channel, const Mark& mark) override {
    lanes_.block(lanes_.channel(channel), mark, capture());
  }
  Moment compute_moment() override { return lanes_.moment(lanes_.compute()); }
  Moment channel_moment(Channel channel) override { return lanes_.moment(lanes_.channel(channel)); }
  double seconds(const Moment& from, const Moment& to) override;
  void select_compute_lane(int lane) override { lanes_.select(lane); }
  int multiprocessors() const override { return multiprocessors_; }
  uint64_t capture() const override { return lanes_.capture(); }
  // Buffers never change channel, so an earlier hop of the same buffer is already ahead in the same stream.
  void order_channel_after_received(Channel, Transfer&) override {}
  void order_channel_after_sent(Channel, Transfer&) override {}

  at::Tensor allocate(Channel, int64_t bytes) override;
  void release(Channel, const at::Tensor& slot) override;
  void delay(Channel channel, std::chrono::microseconds time) override;

  // Throws once the transport has failed.
  virtual void check() const {}

 protected:
  // The hop that ends where `done` marks its channel.
  std::unique_ptr<Transfer> transfer(Mark done);

  at::Device device_;
  CudaLanes lanes_;

 private:
  int multiprocessors_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
