// Identity of the host that this process runs on.
#pragma once

#include <cstdint>
#include <string>

namespace rtp {

// Returns the boot id of the kernel. Two processes have the same id only if they share a host and therefore its steady
// clock. Throws RotationError if the id cannot be read, for example with too many open files: a fallback would let a
// rank choose a different transport than its neighbours.
std::string host_id();

// Returns the PID namespace of this process. Two processes of a host have the same namespace only if they can open each
// other's memory by process id; each container has its own namespace.
std::string processes_id();

uint64_t random_number();

}  // namespace rtp
