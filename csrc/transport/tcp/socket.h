// Sockets: descriptors that are owned, addresses in numbers, and transfers that a stop interrupts.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/checks.h"

namespace rtp {

// A connection that cannot be made, or that the other end has given up.
class ConnectionError : public RotationError {
 public:
  using RotationError::RotationError;
};

// Thrown out of whatever waits on a socket when its ring ends.
struct Stopped {};

// A descriptor of this process alone: a forked process closes its copy, so that the end of this one is seen at once.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket();

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// The address of a network interface: of IPv4, else a global one of IPv6. Throws RotationError where it has none.
std::string interface_address(const std::string& name);
// The address of this host that packets to `host` (a name or an address) leave from.
std::string address_toward(const std::string& host);

Socket listen_at(const std::string& host, int backlog);
int port_of(const Socket& listener);
// The next connection that waits at `listener`; none if none does.
Socket accept_at(const Socket& listener);

// Something to wait for that is raised once and stays so.
Socket make_stop();
void raise_stop(const Socket& stop) noexcept;

// Waits until `socket` is ready for `events` of poll(2) or has failed, for `longest` at most, and says whether it is.
bool wait_ready(const Socket& socket, short events, const Socket& stop, std::chrono::milliseconds longest);

Socket connect_to(const std::string& host, int port, const Socket& stop, std::chrono::milliseconds timeout);

// Sends all of it, however long that takes.
void send_all(const Socket& socket, std::vector<iovec> buffers, const Socket& stop);

// One end of a connection that messages arrive on. Wakes rarely: not before kLowWater of a message has arrived, or all
// of it, or it stalls.
class Incoming {
 public:
  static constexpr size_t kLowWater = 1 << 20;

  Incoming() = default;
  explicit Incoming(Socket socket) : socket_(std::move(socket)) {}
  explicit operator bool() const { return static_cast<bool>(socket_); }

  // Fills `pieces`. `progress` is told how many bytes have arrived, and may throw.
  void receive_all(std::vector<iovec> buffers, const Socket& stop, const std::function<void(size_t)>& progress);

 private:
  void set_low_water(size_t bytes);

  Socket socket_;
  size_t low_water_ = 1;
};

}  // namespace rtp
