#include "base/host.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/checks.h"

namespace rtp {

std::string host_id() {
  const char* path = "/proc/sys/kernel/random/boot_id";
  std::ifstream file(path);
  std::string id;
  if (!(file >> id)) throw RotationError(concat("which host this is: cannot read ", path, ": ", std::strerror(errno)));
  return id;
}

}  // namespace rtp
