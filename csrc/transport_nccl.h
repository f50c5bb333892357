// Direct NCCL: grouped send and receive on communicators of our own, one for weights and one for gradients.
#pragma once

#ifdef RTP_WITH_CUDA

#include <array>
#include <string>

#include "transport.h"

namespace rtp {

// The opaque id that one rank makes and all ranks of a communicator need.
std::string nccl_unique_id();

// The version of the NCCL that torch loaded, and the one whose header was compiled against, as NCCL_VERSION codes.
int nccl_loaded_version();
int nccl_compiled_version();

// `ids`: one unique id per channel, the same on every rank. Collective. NCCL errors are NcclError.
std::shared_ptr<Transport> make_nccl_transport(const std::array<std::string, 2>& ids, int rank, int ranks,
                                               at::Device device, std::chrono::milliseconds timeout);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
