// Links of the emulated ring on a GPU: what stands in for the wire to a neighbour.
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
  // Enqueues the copies of one hop, so that what follows on `stream`, that of `channel`, follows them.
  virtual void copy(Channel channel, const std::vector<Copy>& copies, cudaStream_t stream) = 0;
};

// `name`:
//   sm-local          cudaMemcpyAsync within the GPU, which runs on SMs
//   ce-local[:N]      copies that are asked to leave the SMs alone, cut for N = 1, 2 or 4 streams (1 if not given)
//   nccl-self[:CTAS]  ncclSend and ncclRecv to oneself, on at most CTAS thread blocks (NCCL's choice if not given)
//   pcie              through pinned host memory and back, both ways at once
// Any other is std::invalid_argument; one that does not work here is RotationError.
std::unique_ptr<EmulatedLink> make_emulated_link(const std::string& name, at::Device device);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
