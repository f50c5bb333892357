#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/host.h"

namespace rtp {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// An open file, closed by the destructor unless take() was called.
struct File {
  explicit File(int fd) : fd(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd >= 0) close(fd);
  }
  int take() { return std::exchange(fd, -1); }

  int fd;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... what) {
  const int error = errno;
  throw MemoryError(concat("shared memory: ", what..., ": ", std::strerror(error)));
}

std::byte* map(const File& file, size_t bytes, bool writable = true) {
  void* data = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail("cannot map ", bytes, " bytes");
  return static_cast<std::byte*>(data);
}

uint64_t number_of(const SharedMemory& memory) {
  uint64_t number;
  std::memcpy(&number, memory.data(), sizeof number);
  return number;
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes) : bytes_(bytes) {
  File file(memfd_create("rtp_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd < 0) fail("memfd_create failed");
  if (fchmod(file.fd, S_IRUSR | S_IWUSR) != 0) fail("cannot make it private");
  if (ftruncate(file.fd, static_cast<off_t>(bytes)) != 0) fail("cannot reserve ", bytes, " bytes");
  if (fcntl(file.fd, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) fail("cannot seal its size");
  data_ = map(file, bytes);
  fd_ = file.take();
}

SharedMemory::SharedMemory(int pid, int fd, size_t bytes, bool writable) : bytes_(bytes) {
  const std::string path = concat("/proc/", pid, "/fd/", fd);
  const File file(open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) fail("cannot open ", path);
  struct stat found;
  if (fstat(file.fd, &found) != 0) fail("cannot look at ", path);
  const int seals = fcntl(file.fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw MemoryError(concat("shared memory: expected ", path, " to be memory of a sealed size, got another file"));
  }
  if (bytes == 0 || static_cast<uint64_t>(found.st_size) < bytes) {
    throw MemoryError(concat("shared memory: expected ", path, " to hold ", bytes, " bytes, got ", found.st_size));
  }
  data_ = map(file, bytes, writable);
}

SharedMemory SharedMemory::numbered(size_t bytes) {
  SharedMemory memory(bytes);
  const uint64_t number = random_number();
  std::memcpy(memory.data(), &number, sizeof number);
  return memory;
}

SharedMemory map_numbered(const std::string& text, size_t bytes, bool writable, const std::string& what) {
  try {
    const MemoryAddress address(text);
    if (const auto where = address.out_of_reach()) throw MemoryError(concat("is ", *where));
    SharedMemory mapped(address.pid, address.fd, bytes, writable);
    if (number_of(mapped) != address.nonce) throw MemoryError(concat("is not process ", address.pid));
    return mapped;
  } catch (const MemoryError& error) {
    const std::string told = error.what();
    throw MemoryError(concat(what, told.starts_with("is ") ? " " : ": ", told));
  }
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

MemoryAddress::MemoryAddress(const SharedMemory& memory)
    : host(host_id()), processes(processes_id()), pid(getpid()), fd(memory.fd()), nonce(number_of(memory)) {}

MemoryAddress::MemoryAddress(const std::string& text) {
  std::istringstream fields(text);
  fields >> host >> processes >> pid >> fd >> nonce;
  if (!fields || !(fields >> std::ws).eof() || pid <= 0 || fd < 0) {
    throw MemoryError(concat("shared memory: expected an address 'host processes pid fd nonce', got '", text, "'"));
  }
}

std::string MemoryAddress::text() const { return concat(host, " ", processes, " ", pid, " ", fd, " ", nonce); }

std::optional<std::string> MemoryAddress::out_of_reach() const {
  if (host != host_id()) return "on another host";
  if (const std::string here = processes_id(); processes != here) {
    return concat("in another container of this host (its processes are in ", processes, ", these in ", here, ")");
  }
  return std::nullopt;
}

// Sequential consistency ensures that either ring() sees the sleeper's count, or the kernel sees the incremented
// counter and does not let the thread sleep.
void Bell::ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT, seen, &limit, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
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

}  // namespace rtp
