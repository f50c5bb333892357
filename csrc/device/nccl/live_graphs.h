// CUDA graphs that hold calls of NCCL communicators.
#pragma once

#ifdef RTP_WITH_CUDA

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

namespace rtp {

// Counts the graphs that were captured from given streams, with the executable graphs made of them, until CUDA has
// freed the last of them.
class LiveGraphs {
 public:
  // Counts the graph that `stream` is being captured into; without a capture, nothing.
  void add(cudaStream_t stream);
  // Returns how many are left after at most `patience`.
  int left(std::chrono::milliseconds patience) const;

 private:
  std::shared_ptr<std::atomic<int>> count_ = std::make_shared<std::atomic<int>>(0);
  uint64_t last_ = 0;  // the capture that was counted last
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
