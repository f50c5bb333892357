#include "base/host.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>

#include "base/checks.h"

namespace rtp {

std::string host_id() {
  const char* path = "/proc/sys/kernel/random/boot_id";
  std::ifstream file(path);
  std::string id;
  if (!(file >> id)) throw RotationError(concat("host id: cannot read ", path, ": ", std::strerror(errno)));
  return id;
}

std::string processes_id() {
  char name[64];
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof(name));
  return length > 0 ? std::string(name, static_cast<size_t>(length)) : "unknown";
}

uint64_t random_number() {
  static thread_local std::random_device random;
  return (static_cast<uint64_t>(random()) << 32) | random();
}

}  // namespace rtp
