// Copies between device addresses that leave the SMs to the GEMMs where the driver can do that.
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

  // Whether copies carry the wish to overlap with compute (cudaMemcpyBatchAsync: CUDA 12.8, in the build and in the
  // driver). Without it a copy within one GPU runs on SMs; a copy to another GPU uses copy engines either way.
  bool batched() const { return batched_; }

  // Enqueues copies that do not overlap each other; their order among themselves is free. A batch cannot be captured,
  // so that a graph gets plain copies. `captured`: whether the stream takes part in a capture.
  void copy(const std::vector<Copy>& copies, cudaStream_t stream, bool captured) const;

 private:
  bool batched_ = false;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
