// Device copies that use copy engines instead of SMs, if the driver supports it, so that GEMMs keep the SMs.
#pragma once

#ifdef RTP_WITH_CUDA

#include <cstddef>
#include <vector>

#include "base/handles.h"

namespace rtp {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

class CopyEngine {
 public:
  CopyEngine();

  // Returns whether copies request overlap with compute (cudaMemcpyBatchAsync: CUDA 12.8 in the build and in the
  // driver). Without it, a copy within one GPU runs on SMs; a copy to another GPU uses copy engines in either case.
  bool batched() const { return batched_; }

  // Enqueues copies that do not overlap each other, in unspecified order. A batch cannot be captured, so a graph gets
  // plain copies. `captured`: whether the stream takes part in a capture.
  void copy(const std::vector<Copy>& copies, cudaStream_t stream, bool captured) const;

 private:
  bool batched_ = false;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
