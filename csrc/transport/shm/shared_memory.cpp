#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/checks.h"

namespace rtp {
namespace {

std::byte* map(int fd, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd);
    throw RotationError(concat("shared memory: cannot map ", bytes, " bytes: ", std::strerror(error)));
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes) : bytes_(bytes) {
  fd_ = memfd_create("rtp_ext", MFD_CLOEXEC);
  if (fd_ < 0) throw RotationError(concat("shared memory: memfd_create failed: ", std::strerror(errno)));
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd_);
    throw RotationError(concat("shared memory: cannot reserve ", bytes, " bytes: ", std::strerror(error)));
  }
  data_ = map(fd_, bytes);
}

SharedMemory::SharedMemory(int pid, int fd, size_t bytes) : bytes_(bytes) {
  const std::string path = concat("/proc/", pid, "/fd/", fd);
  fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) throw RotationError(concat("shared memory: cannot open ", path, ": ", std::strerror(errno)));
  data_ = map(fd_, bytes);
  close(std::exchange(fd_, -1));
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

void Bell::ring() {
  count_.fetch_add(1, std::memory_order_acq_rel);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

ProcessWatch::ProcessWatch(int pid) : fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) close(fd_);
}

bool ProcessWatch::ended() const {
  pollfd query{fd_, POLLIN, 0};
  return fd_ >= 0 && poll(&query, 1, 0) > 0;
}

std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

}  // namespace rtp
