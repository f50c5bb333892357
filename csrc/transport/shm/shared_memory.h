// Anonymous shared memory that other processes of the same user can map, and a futex to wait on inside it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace rtp {

// A mapped memory file. It has no name in any file system, so nothing is left behind when a process is killed.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Creates `bytes` of zeroed memory.
  explicit SharedMemory(size_t bytes);
  // Maps the memory that process `pid` holds open as `fd`.
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

// A counter that anybody may raise and anybody may wait on, across processes.
class Bell {
 public:
  uint32_t value() const { return count_.load(std::memory_order_acquire); }
  void ring();
  // Sleeps until the counter differs from `seen`, or for `longest`.
  void sleep(uint32_t seen, std::chrono::nanoseconds longest);

 private:
  std::atomic<uint32_t> count_{0};
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

// The boot id of this machine's kernel: equal on two processes only if they share a host.
std::string host_id();

}  // namespace rtp
