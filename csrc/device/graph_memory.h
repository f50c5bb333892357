// Memory that the work of graphs takes while it runs.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/core/Device.h>

#include <memory>

namespace rtp {

// One pool for all graphs of a ring, which run one after the other: nothing in it outlives the graph that it is of, and
// nobody else is given it. What is allocated while something is captured would else go to others as soon as the capture
// has ended, and replays would write to it.
class GraphMemory {
 public:
  explicit GraphMemory(c10::Device device);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // What the calling thread allocates in between comes from the pool.
  void begin();
  void end() noexcept;

 private:
  struct Pool;

  c10::Device device_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
