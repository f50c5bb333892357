// Anonymous shared memory that other processes of the same user can map, and a futex to wait on inside it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/checks.h"

namespace rtp {

// Memory that cannot be made or mapped, or that another process describes wrongly.
class MemoryError : public RotationError {
 public:
  using RotationError::RotationError;
};

// A mapped memory file. It has no name in any file system, so nothing is left behind when a process is killed. Only
// processes of the same user can open it, and its size is sealed: nobody can take away what others have mapped.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Creates `bytes` of zeroed memory.
  explicit SharedMemory(size_t bytes);
  // Maps the memory that process `pid` holds open as `fd`. What it says is not trusted: the file has to be one of ours,
  // of `bytes` bytes or more.
  SharedMemory(int pid, int fd, size_t bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  bool contains(const std::byte* address) const { return address >= data_ && address < data_ + bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
};

// Where a process keeps memory that others map, as one tells another in a line of text.
struct MemoryAddress {
  // Of memory of this process. `nonce`: what lies in it, to tell it from other memory.
  MemoryAddress(const SharedMemory& memory, uint64_t nonce);
  // Throws MemoryError for a text that is none.
  explicit MemoryAddress(const std::string& text);

  std::string text() const;
  // Where it is, if this process cannot map it: on another host, in another container.
  std::optional<std::string> out_of_reach() const;

  std::string host;       // the boot id of the kernel
  std::string processes;  // the namespace that `pid` counts in
  int pid = 0;
  int fd = -1;
  uint64_t nonce = 0;
};

// A counter that anybody may raise and anybody may wait on, across processes. Raising it calls the kernel only where
// somebody sleeps.
class Bell {
 public:
  uint32_t value() const { return count_.load(std::memory_order_acquire); }
  void ring();
  // Sleeps until the counter differs from `seen`, or for `longest`.
  void sleep(uint32_t seen, std::chrono::nanoseconds longest);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};  // too many where one was killed in its sleep, never too few
};

// Whether a process has ended, also when its parent has not collected it yet.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(int pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  ~ProcessWatch();

  bool ended() const;

 private:
  int fd_ = -1;
};

}  // namespace rtp
