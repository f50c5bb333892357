// Which host this process runs on.
#pragma once

#include <string>

namespace rtp {

// The boot id of this machine's kernel: equal on two processes only if they share a host, and with it a steady clock.
// Throws RotationError where it cannot be read, as where too many files are open: a rank that took itself for another
// host would choose otherwise than its neighbours.
std::string host_id();

// The namespace that this process's id counts in: equal on two processes of a host only if they can open each other's
// memory by process id. Containers have one each.
std::string processes_id();

}  // namespace rtp
