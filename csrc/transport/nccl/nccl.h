// A transport over NCCL: grouped send and receive on owned communicators, one for weights and one for gradients.
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
  // Whether slots are registered, so that NCCL moves them without intermediate copies; hops can then use slots only.
  // Same on all ranks: NCCL leaves a hop with one registered end undefined.
  bool registered = false;
};

// `ids`: one unique id for weights and one for gradients, equal on all ranks. Collective. NCCL errors become NcclError.
std::shared_ptr<Transport> make_nccl_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                               const NcclOptions& options);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
