// One-sided NCCL: puts and signals, which copy engines carry out between GPUs of one host, without SMs.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nccl/supervised.h"

namespace rtp {

inline constexpr size_t kNcclPutCommunicators = 4;  // weights, gradients, the credits of each

// Why this process cannot use the transport, as far as it can tell alone.
std::optional<std::string> nccl_put_refusal();

// Collective. Throws where NCCL gives no windows or refuses a first put.
//
// What waits for the signal of a dead rank cannot be ended: NCCL aborts kernels only. The failure is raised all the
// same, but the stream, and whoever synchronises with it, stays stuck until the process ends.
std::shared_ptr<Transport> make_nccl_put_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                                   const CommunicatorOptions& options);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
