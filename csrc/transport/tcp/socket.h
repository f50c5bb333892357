// Sockets: owned descriptors, numeric addresses, and transfers that a stop event interrupts.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/checks.h"

namespace rtp {

// A connection cannot be made, or the other end has closed it.
class ConnectionError : public RotationError {
 public:
  using RotationError::RotationError;
};

// Thrown by waits on a socket when the ring ends.
struct Stopped {};

// A descriptor owned by this process: a forked process closes its copy, so that peers notice at once when this process
// closes its own.
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

// Returns the address of a network interface: IPv4 or, without one, global IPv6. Throws RotationError if it has none.
std::string interface_address(const std::string& name);
// Returns the local address from which packets to `host` (a name or an address) are sent.
std::string address_toward(const std::string& host);

Socket listen_at(const std::string& host, int backlog);
int port_of(const Socket& listener);
// Returns the next pending connection of `listener`, which sends without delay; an empty socket if there is none.
// Throws ConnectionError if this process has no descriptors or memory for another one.
Socket accept_at(const Socket& listener);

// An event for waits, which stays raised until it is lowered.
Socket make_stop();
void raise_stop(const Socket& stop) noexcept;
void lower_stop(const Socket& stop) noexcept;

// Waits at most `longest` until `socket` is ready for `events` of poll(2) or has failed. Returns whether it is.
bool wait_ready(const Socket& socket, short events, const Socket& stop, std::chrono::milliseconds longest);

Socket connect_to(const std::string& host, int port, const Socket& stop, std::chrono::milliseconds timeout);

// Sends all buffers, without a time limit.
void send_all(const Socket& socket, std::vector<iovec> buffers, const Socket& stop);

// The receiving end of a connection. Wakes rarely: after kLowWater bytes of a message or its rest have arrived, or if
// it stalls.
class Incoming {
 public:
  static constexpr size_t kLowWater = 1 << 20;

  static constexpr auto kEver = std::chrono::hours(24 * 365);

  Incoming() = default;
  explicit Incoming(Socket socket) : socket_(std::move(socket)) {}
  explicit operator bool() const { return static_cast<bool>(socket_); }
  const Socket& socket() const { return socket_; }
  // Gives the connection away; another reader may wake for every byte.
  Socket release() {
    set_low_water(1);
    return std::move(socket_);
  }

  // Fills `buffers`. Calls `progress` with the number of received bytes; it may throw. Returns false if the other end
  // closed the connection before the first byte. Throws RingTimeout if nothing arrives for `silence`.
  bool receive_all(std::vector<iovec> buffers, const Socket& stop, const std::function<void(size_t)>& progress,
                   std::chrono::milliseconds silence = kEver);

 private:
  void set_low_water(size_t bytes);

  Socket socket_;
  size_t low_water_ = 1;
};

}  // namespace rtp
