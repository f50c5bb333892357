// The compute streams of a CUDA device: the caller's current stream, and one beside it. Transports reach torch's CUDA
// classes only through this file; otherwise they call the CUDA runtime and NCCL directly.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "base/handles.h"
#include "device/event_pool.h"
#include "device/graph_memory.h"
#include "device/streams.h"

namespace rtp {

// Returns torch's current stream of a device.
cudaStream_t current_stream(at::Device device);

// Makes `device` the current device of the calling thread during its lifetime. A nested scope for the same device makes
// no call. The destructor restores the previous device, except that CUDA keeps the current one if the process has no
// context on the previous device; only torch's record is restored then. Setting it in CUDA would create a context,
// which takes hundreds of MiB on a GPU that other processes use.
class DeviceScope {
 public:
  explicit DeviceScope(at::Device device);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope();

 private:
  int device_ = -1;  // -1: the scope has no effect
  int before_ = 0;
  int outer_ = -1;
};

class CudaStreams : public Streams {
 public:
  explicit CudaStreams(at::Device device);

  bool on_host() const override { return false; }
  StreamEvent record_compute() override { return event(compute()); }
  void order_compute_after(const StreamEvent& event) override { block(compute(), event, capture()); }
  void select_compute_stream(int index) override;
  int multiprocessors() const override { return multiprocessors_; }
  // The capture of the caller's stream.
  uint64_t capture() const override;
  void begin_pass() override;
  void end_pass() override;
  void enter() override;
  void leave() override;
  Moment compute_moment() override { return moment(compute()); }
  double seconds(const Moment& from, const Moment& to) override;

  bool has_graphs() const override { return true; }
  void begin_graph_stream(bool captured) override;
  std::shared_ptr<Graph> end_graph_stream() override;
  void abandon_graph_stream() noexcept override;
  bool capturing() const override { return capturing_; }
  void launch(Graph& graph) override;

  cudaStream_t compute() const { return current_stream(device_); }
  StreamEvent event(cudaStream_t stream) const;
  Moment moment(cudaStream_t stream) const;
  // Orders `stream` after an event of another stream. This compares handles, so it holds for streams that live as long
  // as this object.
  void order_after(cudaStream_t stream, const StreamEvent& event) const;

 private:
  // Makes `stream` wait for `event` if both belong to the same capture. A capture boundary needs no wait: work enqueued
  // before a capture has been waited for, and the launch orders the work of a graph. `within`: the capture of the
  // current pass; it applies also to streams that have not joined the capture yet.
  void block(cudaStream_t stream, const StreamEvent& event, uint64_t within) const;

  at::Device device_;
  int multiprocessors_ = 0;
  mutable EventPool events_;
  int passes_ = 0;                   // passes in progress
  std::optional<uint64_t> capture_;  // capture of the pass that began last; empty between passes
  int entered_ = 0;
  std::optional<DeviceScope> scope_;  // scope of the outermost enter()
  Stream side_;                       // owned, because torch's pool gives one stream to several users
  cudaStream_t main_ = nullptr;       // the caller's stream while compute stream 1 is selected
  std::shared_ptr<void> restore_;     // the same as a torch stream object; null while compute stream 0 is selected
  Stream graph_stream_;
  std::shared_ptr<void> caller_stream_;  // the caller's torch stream while the graph stream is current; otherwise null
  bool capturing_ = false;
  std::shared_ptr<GraphMemory> graph_memory_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
