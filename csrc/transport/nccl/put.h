// A transport over one-sided NCCL: puts and signals, which copy engines execute between GPUs of one host, without SMs.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nccl/supervised.h"

namespace rtp {

inline constexpr size_t kNcclPutCommunicators = 4;  // weights, gradients, and the credits of each

// Returns why this process cannot use the transport; nothing if no local reason is known.
std::optional<std::string> nccl_put_refusal();

// Collective. Throws if NCCL provides no windows or rejects the first put.
//
// A wait for the signal of a dead rank cannot be ended: NCCL aborts kernels only. The failure is raised, but the
// stream, and every host thread that synchronizes with it, stays blocked until the process ends.
std::shared_ptr<Transport> make_nccl_put_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                                   const CommunicatorOptions& options);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
