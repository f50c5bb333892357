// A loopback transport: every neighbour is this rank itself, so one process emulates a ring of R ranks. Hops are real
// copies; every shard has the values of this rank's own shard, whatever its nominal owner. A linear layer on an
// emulated ring therefore equals the plain layer whose weight is this rank's shard repeated R times, which tests use as
// the reference.
#pragma once

#include <optional>
#include <string>

#include "transport/transport.h"

namespace rtp {

// `link`: replacement of the wire on a CUDA device (emulated/links.h), sm-local by default; on a CPU a wire of limited
// rate (emulated/wire.h), by default a copy that takes no time beside its own.
std::shared_ptr<Transport> make_emulated_transport(at::Device device, const std::optional<std::string>& link);

}  // namespace rtp
