// The lanes of a CUDA device: the caller's current stream computes, one high-priority stream per channel carries.
// The only place where transports meet torch's CUDA; everything else of theirs calls the CUDA runtime and NCCL.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>

#include "base/handles.h"
#include "device/event_pool.h"
#include "device/graph_memory.h"
#include "device/streams.h"

namespace rtp {

// torch's current stream of a device.
cudaStream_t current_stream(at::Device device);

// Makes `device` the calling thread's current one for as long as it lives. Within another one of the same device it
// calls nothing. What was current before is so again, but where the process has no context on that device, torch alone
// knows of it: to make it current for CUDA, too, would create one, hundreds of MiB on a GPU that others use.
class DeviceScope {
 public:
  explicit DeviceScope(at::Device device);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope();

 private:
  int device_ = -1;  // -1: nothing to do
  int before_ = 0;
  int outer_ = -1;
};

class CudaStreams : public Streams {
 public:
  explicit CudaStreams(at::Device device);

  StreamEvent record_compute() override { return event(compute()); }
  void order_compute_after(const StreamEvent& event) override { block(compute(), event, capture()); }
  void order_channel_after(Channel channel, const StreamEvent& event) override {
    block(this->channel(channel), event, capture());
  }
  void select_compute_stream(int lane) override;
  int multiprocessors() const override { return multiprocessors_; }
  // That of the caller's stream.
  uint64_t capture() const override;
  void begin_pass() override;
  void end_pass() override;
  void enter() override;
  void leave() override;
  Moment compute_moment() override { return moment(compute()); }
  Moment channel_moment(Channel channel) override { return moment(this->channel(channel)); }
  double seconds(const Moment& from, const Moment& to) override;
  void delay(Channel channel, std::chrono::microseconds time) override;

  bool has_graphs() const override { return true; }
  void begin_aside(bool captured) override;
  std::shared_ptr<Graph> end_aside() override;
  void leave_aside() noexcept override;
  bool capturing() const override { return capturing_; }
  void launch(Graph& graph) override;

  cudaStream_t channel(Channel channel) const { return streams_[static_cast<size_t>(channel)].get(); }
  cudaStream_t compute() const { return current_stream(device_); }
  StreamEvent event(cudaStream_t stream) const;

 private:
  Moment moment(cudaStream_t stream) const;
  // What was enqueued outside a capture has ended before it begins, and what a graph contains is ordered where the
  // graph is launched: across that border no stream may, or need, wait for a mark. `within`: the capture that marks of
  // this pass belong to, also for streams that have not joined it yet.
  void block(cudaStream_t stream, const StreamEvent& event, uint64_t within) const;

  at::Device device_;
  int multiprocessors_ = 0;
  mutable EventPool events_;
  int passes_ = 0;                   // that have begun and not ended
  std::optional<uint64_t> capture_;  // of the pass that began last; empty between passes
  int entered_ = 0;
  std::optional<DeviceScope> scope_;  // of the outermost enter()
  std::array<Stream, 2> streams_;     // of our own: torch's pool hands the same stream to several users
  Stream side_;
  cudaStream_t main_ = nullptr;    // the caller's stream, while lane 1 is selected
  std::shared_ptr<void> restore_;  // the same as torch knows it; null while lane 0 is selected
  Stream aside_;
  std::shared_ptr<void> from_;  // the caller's stream, as torch knows it, while work goes aside; else null
  bool capturing_ = false;
  std::shared_ptr<GraphMemory> graph_memory_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
