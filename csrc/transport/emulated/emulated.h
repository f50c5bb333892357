// Every neighbour is this rank: one process stands for a ring of R. Hops are real copies; whatever owner a shard is
// said to have, its values are this rank's own. A linear layer on an emulated ring is therefore the plain layer whose
// weight is this rank's shard repeated R times, which is what tests compare it with.
#pragma once

#include <optional>
#include <string>

#include "transport/transport.h"

namespace rtp {

// `link`: what stands in for the wire on a CUDA device (emulated_links.h), sm-local if not given; none on a CPU.
std::shared_ptr<Transport> make_emulated_transport(at::Device device, const std::optional<std::string>& link);

}  // namespace rtp
