// Memory for the intermediate tensors of captured passes.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/core/Device.h>

#include <memory>

namespace rtp {

// One pool for all graphs of a ring. The graphs run one after the other, and no tensor in the pool outlives its graph.
// Without a private pool, the allocator could reuse memory allocated during a capture as soon as the capture ends, and
// replays would overwrite the new owner's data.
class GraphMemory {
 public:
  explicit GraphMemory(c10::Device device);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // Between begin() and end(), allocations of the calling thread come from the pool.
  void begin();
  void end() noexcept;

 private:
  struct Pool;

  c10::Device device_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
