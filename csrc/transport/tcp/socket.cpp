#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace rtp {
namespace {

constexpr auto kStallInterval = std::chrono::milliseconds(100);  // interval after which a partial message is read

template <typename... What>
[[noreturn]] void fail(const What&... what) {
  const int cause = errno;
  throw ConnectionError(concat(what..., ": ", std::strerror(cause)));
}

// The descriptors that a forked process must close. The lock is held during a fork, so that the copy is consistent.
struct OpenSockets {
  std::mutex mutex;
  std::set<int> descriptors;

  static OpenSockets& all() {
    static OpenSockets* const sockets = [] {
      pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                     [] {
                       for (const int fd : all().descriptors) close(fd);
                       all().descriptors.clear();
                       all().mutex.unlock();
                     });
      return new OpenSockets;
    }();
    return *sockets;
  }
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, int type, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem != 0) throw ConnectionError(concat("cannot resolve ", host, ": ", gai_strerror(problem)));
  return {found, &freeaddrinfo};
}

std::string in_numbers(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  const int problem = getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  if (problem != 0) throw ConnectionError(concat("cannot write an address in numbers: ", gai_strerror(problem)));
  return host;
}

Socket open_socket(const addrinfo& address, int flags) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol));
  if (!socket) fail("cannot open a socket");
  return socket;
}

void set_option(const Socket& socket, int level, int option, int value) {
  if (setsockopt(socket.fd(), level, option, &value, sizeof value) != 0) fail("cannot set an option of a socket");
}

// Skips the first `bytes` of the buffers from `first` on, and returns the first remaining buffer.
size_t advance(std::vector<iovec>& buffers, size_t first, size_t bytes) {
  while (first < buffers.size() && bytes >= buffers[first].iov_len) bytes -= buffers[first++].iov_len;
  if (bytes > 0) {
    buffers[first].iov_base = static_cast<std::byte*>(buffers[first].iov_base) + bytes;
    buffers[first].iov_len -= bytes;
  }
  return first;
}

}  // namespace

Socket::Socket(int fd) {
  if (fd < 0) return;
  OpenSockets& open = OpenSockets::all();
  const std::lock_guard lock(open.mutex);
  open.descriptors.insert(fd);
  fd_ = fd;
}

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ < 0) return;
  OpenSockets& open = OpenSockets::all();
  const std::lock_guard lock(open.mutex);
  open.descriptors.erase(fd_);
  close(fd_);
}

std::string interface_address(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) fail("cannot list the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(found, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family || name != each->ifa_name) continue;
      if (family == AF_INET) return in_numbers(each->ifa_addr, sizeof(sockaddr_in));
      const auto* address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) return in_numbers(each->ifa_addr, sizeof(sockaddr_in6));
    }
  }
  throw RotationError(concat("expected a network interface ", name, " with an address"));
}

std::string address_toward(const std::string& host) {
  const Addresses found = resolve(host, 9, SOCK_DGRAM, 0);  // sends no packet
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    const Socket socket(::socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, each->ai_protocol));
    if (!socket || connect(socket.fd(), each->ai_addr, each->ai_addrlen) != 0) continue;  // the kernel may lack IPv6
    sockaddr_storage here{};
    socklen_t length = sizeof here;
    if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&here), &length) != 0) fail("cannot read an address");
    return in_numbers(reinterpret_cast<const sockaddr*>(&here), length);
  }
  fail("no route to ", host);
}

Socket listen_at(const std::string& host, int backlog) {
  const Addresses address = resolve(host, 0, SOCK_STREAM, AI_NUMERICHOST | AI_PASSIVE);
  Socket listener = open_socket(*address, SOCK_NONBLOCK);
  if (bind(listener.fd(), address->ai_addr, address->ai_addrlen) != 0) fail("cannot bind to ", host);
  if (listen(listener.fd(), backlog) != 0) fail("cannot listen at ", host);
  return listener;
}

int port_of(const Socket& listener) {
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  if (getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&here), &length) != 0) fail("cannot read a port");
  return ntohs(here.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(here).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(here).sin_port);
}

Socket accept_at(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
    fail("cannot accept a connection");
  }
  // otherwise the last bytes of an answer wait for an acknowledgement, up to 40 ms
  const int at_once = 1;
  if (socket) setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  return socket;
}

Socket make_stop() {
  Socket stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop) fail("cannot make an eventfd");
  return stop;
}

void raise_stop(const Socket& stop) noexcept { eventfd_write(stop.fd(), 1); }

void lower_stop(const Socket& stop) noexcept {
  eventfd_t value;
  eventfd_read(stop.fd(), &value);
}

bool wait_ready(const Socket& socket, short events, const Socket& stop, std::chrono::milliseconds longest) {
  pollfd both[] = {{socket.fd(), events, 0}, {stop.fd(), POLLIN, 0}};
  if (poll(both, 2, static_cast<int>(std::min<int64_t>(longest.count(), 1 << 30))) < 0 && errno != EINTR) {
    fail("cannot wait for a connection");
  }
  if (both[1].revents != 0) throw Stopped{};
  return both[0].revents != 0;
}

Socket connect_to(const std::string& host, int port, const Socket& stop, std::chrono::milliseconds timeout) {
  const Addresses address = resolve(host, port, SOCK_STREAM, AI_NUMERICHOST);
  Socket socket = open_socket(*address, SOCK_NONBLOCK);
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (connect(socket.fd(), address->ai_addr, address->ai_addrlen) != 0) {
    if (errno != EINPROGRESS) fail("cannot connect to ", host, " port ", port);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    bool ready = false;
    while (!ready) {
      const auto left = deadline - std::chrono::steady_clock::now();
      errno = ETIMEDOUT;
      if (left <= left.zero()) fail("cannot connect to ", host, " port ", port);
      ready = wait_ready(socket, POLLOUT, stop, std::chrono::ceil<std::chrono::milliseconds>(left));
    }
    int problem = 0;
    socklen_t length = sizeof problem;
    if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &problem, &length) != 0) fail("cannot read an error");
    errno = problem;
    if (problem != 0) fail("cannot connect to ", host, " port ", port);
  }
  return socket;
}

void send_all(const Socket& socket, std::vector<iovec> buffers, const Socket& stop) {
  size_t first = 0;
  while (first < buffers.size()) {
    msghdr message{};
    message.msg_iov = &buffers[first];
    message.msg_iovlen = buffers.size() - first;
    const ssize_t sent = sendmsg(socket.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      first = advance(buffers, first, static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      wait_ready(socket, POLLOUT, stop, std::chrono::hours(1));
    } else if (errno != EINTR) {
      fail("cannot send");
    }
  }
}

void Incoming::set_low_water(size_t bytes) {
  if (bytes == low_water_) return;
  set_option(socket_, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(bytes));
  low_water_ = bytes;
}

bool Incoming::receive_all(std::vector<iovec> buffers, const Socket& stop, const std::function<void(size_t)>& progress,
                           std::chrono::milliseconds silence) {
  size_t total = 0, received = 0, first = 0;
  for (const iovec& buffer : buffers) total += buffer.iov_len;
  auto heard = std::chrono::steady_clock::now();
  while (received < total) {
    set_low_water(std::min(kLowWater, total - received));
    // Also reads less after a stall: the message may be shorter than expected.
    wait_ready(socket_, POLLIN, stop, std::min(kStallInterval, silence));
    msghdr message{};
    message.msg_iov = &buffers[first];
    message.msg_iovlen = buffers.size() - first;
    const ssize_t found = recvmsg(socket_.fd(), &message, MSG_DONTWAIT);
    if (found > 0) {
      heard = std::chrono::steady_clock::now();
      received += static_cast<size_t>(found);
      first = advance(buffers, first, static_cast<size_t>(found));
      progress(received);
    } else if (found == 0) {
      if (received == 0) return false;
      throw ConnectionError("it ended the connection");
    } else if (errno != EAGAIN && errno != EINTR) {
      fail("cannot receive");
    } else if (std::chrono::steady_clock::now() - heard >= silence) {
      throw RingTimeout(concat("nothing arrived for ", std::chrono::duration<double>(silence).count(), " s"));
    }
  }
  return true;
}

}  // namespace rtp
