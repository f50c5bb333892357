// Which host this process runs on.
#pragma once

#include <string>

namespace rtp {

// The boot id of this machine's kernel: equal on two processes only if they share a host, and with it a steady clock.
// Throws RotationError where it cannot be read, as where too many files are open: a rank that took itself for another
// host would choose otherwise than its neighbours.
std::string host_id();

}  // namespace rtp
