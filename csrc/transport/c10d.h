// A transport over any torch.distributed backend: Gloo on CPU, NCCL through ProcessGroupNCCL on CUDA.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/transport.h"

namespace rtp {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Both groups hold exactly the ranks of the ring, in ring order.
std::shared_ptr<Transport> make_c10d_transport(Group weight, Group gradient, at::Device device,
                                               std::chrono::milliseconds timeout);

}  // namespace rtp
