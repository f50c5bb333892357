// Pulls that copy engines run.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <string>
#include <vector>

#include "base/checks.h"
#include "device/copy_engine.h"
#include "device/cuda_streams.h"
#include "engine/shards/shard_source.h"

namespace rtp {

// Copies on a stream of their own, each after the computes that were enqueued before it; computes wait for the copy
// that they read. No other rank takes part.
class CopyPulls {
 public:
  explicit CopyPulls(at::Device device) : device_(device), streams_(device) {
    const DeviceScope scope(device_);
    stream_ = Stream::highest_priority();
  }

  // Starts to copy into each target as many bytes from each of the sources.
  std::shared_ptr<Pull> start(const std::vector<at::Tensor>& targets, const std::vector<const std::byte*>& sources) {
    const DeviceScope scope(device_);
    if (streams_.capture() != 0) {
      throw RotationError("forwards of a model that rotate_for_inference has converted cannot be captured in a graph");
    }
    std::vector<Copy> copies;
    for (size_t index = 0; index < targets.size(); ++index) {
      if (targets[index].nbytes() > 0) {
        copies.push_back({targets[index].data_ptr(), sources[index], targets[index].nbytes()});
      }
    }
    streams_.order_after(stream_.get(), streams_.record_compute());
    engine_.copy(copies, stream_.get(), /*captured=*/false);
    return std::make_shared<Copied>(streams_, streams_.event(stream_.get()));
  }

  // Waits on the host until all copies have ended.
  void synchronize() {
    const DeviceScope scope(device_);
    RTP_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
  }

 private:
  class Copied : public Pull {
   public:
    Copied(CudaStreams& streams, StreamEvent arrived) : streams_(streams), arrived_(std::move(arrived)) {}

    void wait() override { streams_.order_compute_after(arrived_); }
    void drop() noexcept override {
      try {
        wait();
      } catch (...) {  // a CUDA error, which the next call reports, too
      }
    }

   private:
    CudaStreams& streams_;
    StreamEvent arrived_;
  };

  const at::Device device_;
  CudaStreams streams_;
  CopyEngine engine_;
  Stream stream_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
