// Anonymous shared memory that other processes of the same user can map, and a futex-based counter inside it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/checks.h"

namespace rtp {

// Shared memory cannot be created or mapped, or another process describes it incorrectly.
class MemoryError : public RotationError {
 public:
  using RotationError::RotationError;
};

// A mapped memory file. It has no name in any file system, so a killed process leaves nothing behind. Only processes of
// the same user can open it, and its size is sealed, so that no process can truncate mapped memory.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Creates `bytes` of zeroed memory.
  explicit SharedMemory(size_t bytes);
  // Maps the memory that process `pid` holds open as `fd`. Verifies that the file is a sealed memory file of at least
  // `bytes` bytes. The mapping keeps the memory after the end of that process.
  SharedMemory(int pid, int fd, size_t bytes, bool writable = true);
  // Creates memory that begins with a random number, by which other processes know it again.
  static SharedMemory numbered(size_t bytes);
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

// The address of shared memory, exchanged between processes as one line of text.
struct MemoryAddress {
  // The address of numbered memory of this process.
  explicit MemoryAddress(const SharedMemory& memory);
  // Throws MemoryError for an invalid text.
  explicit MemoryAddress(const std::string& text);

  std::string text() const;
  // Returns where the memory is if this process cannot map it: on another host, or in another container.
  std::optional<std::string> out_of_reach() const;

  std::string host;       // boot id of the kernel
  std::string processes;  // PID namespace of `pid`
  int pid = 0;
  int fd = -1;
  uint64_t nonce = 0;  // the number of the memory
};

// Maps the numbered memory of another process. `what`: names it in errors, which are MemoryErrors.
SharedMemory map_numbered(const std::string& address, size_t bytes, bool writable, const std::string& what);

// A counter that processes increment and wait on. An increment makes a system call only if a process sleeps.
class Bell {
 public:
  uint32_t value() const { return count_.load(std::memory_order_acquire); }
  void ring();
  // Sleeps until the counter differs from `seen`, for at most `longest`.
  void sleep(uint32_t seen, std::chrono::nanoseconds longest);

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};  // too high if a sleeping process was killed, never too low
};

// Detects whether a process has ended, even before its parent has reaped it.
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
