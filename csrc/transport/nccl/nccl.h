// Direct NCCL: grouped send and receive on communicators of our own, one for weights and one for gradients.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nccl/supervised.h"

namespace rtp {

struct NcclOptions {
  CommunicatorOptions communicators;
  // Slots are registered, so that NCCL moves them without copies of its own; hops then start from and land in slots
  // only. All ranks alike: NCCL leaves a hop with one registered end undefined.
  bool registered = false;
};

// `ids`: a unique id for weights and one for gradients, the same on every rank. Collective. NCCL errors are NcclError.
std::shared_ptr<Transport> make_nccl_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                               const NcclOptions& options);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
