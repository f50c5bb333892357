// Links of the emulated ring on a GPU, which replace the wire to a neighbour.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <string>
#include <vector>

#include "device/copy_engine.h"
#include "device/cuda_streams.h"

namespace rtp {

class EmulatedLink {
 public:
  virtual ~EmulatedLink() = default;
  virtual int multiprocessors() const { return 0; }  // as in Transport
  // Enqueues the copies of one hop, so that later work on `stream`, the stream of `channel`, is ordered after them.
  virtual void copy(Channel channel, const std::vector<Copy>& copies, cudaStream_t stream) = 0;
};

// `name`:
//
//   sm-local          cudaMemcpyAsync within the GPU, which runs on SMs
//   ce-local[:N]      copies that request copy engines, split across N = 1, 2 or 4 streams (default 1)
//   nccl-self[:CTAS]  ncclSend and ncclRecv to oneself, on at most CTAS thread blocks (default: chosen by NCCL)
//   pcie              through pinned host memory and back, in both directions at once
//
// Throws std::invalid_argument for another name, and RotationError for a link that is not supported here.
std::unique_ptr<EmulatedLink> make_emulated_link(const std::string& name, at::Device device);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
