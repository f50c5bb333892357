#include "engine/shards/pulled_shards.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "base/checks.h"

namespace rtp {
namespace {

constexpr auto kWake = std::chrono::hours(1);  // longest sleep of a thread that waits for requests

// A request for one part of the owner's memory. The answer is its bytes.
struct Request {
  uint64_t number;  // of the owner's memory
  int64_t offset;
  int64_t bytes;
};

// Receives exactly `bytes`. Returns false if the other end closed the connection before the first byte.
template <typename Wait>
bool receive_all(const Socket& socket, std::byte* data, size_t bytes, Wait&& wait) {
  size_t received = 0;
  while (received < bytes) {
    const ssize_t found = recv(socket.fd(), data + received, bytes - received, MSG_DONTWAIT);
    if (found > 0) {
      received += static_cast<size_t>(found);
    } else if (found == 0) {
      if (received == 0) return false;
      throw ConnectionError("the connection ended");
    } else if (errno == EAGAIN) {
      wait();
    } else if (errno != EINTR) {
      throw ConnectionError(concat("cannot receive: ", std::strerror(errno)));
    }
  }
  return true;
}

}  // namespace

PulledShards::PulledShards(int rank, int ranks, int64_t bytes, const std::string& host,
                           std::chrono::milliseconds timeout)
    : ShardSource(rank, ranks, bytes),
      host_(host),
      timeout_(timeout),
      stop_(make_stop()),
      listener_(listen_at(host, ranks)),
      accepting_([this] { accept(); }) {}

std::string PulledShards::address() const { return concat(port_of(listener_), ' ', number(), ' ', host_); }

void PulledShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    auto owner = std::make_unique<Owner>();
    std::istringstream fields(addresses[peer]);
    fields >> owner->port >> owner->number >> owner->host;
    RTP_CHECK_VALUE(!fields.fail(), "pulled shards: expected 'port number host', got '", addresses[peer], "'");
    owner->bytes = bytes[peer];
    owner->offsets = offsets[peer];
    owners_.push_back(std::move(owner));
  }
  set_offsets(offsets[rank()]);
}

void PulledShards::pull(const std::vector<at::Tensor>& local, int owner_rank, const std::vector<at::Tensor>& targets) {
  Owner& owner = *owners_[owner_rank];
  const std::lock_guard lock(owner.mutex);
  const auto named = [&](const auto&... what) {
    return concat("a pull of shards from rank ", owner_rank, " of the ring at ", owner.host, ": ", what...);
  };
  try {
    if (!owner.socket) owner.socket = connect_to(owner.host, owner.port, stop_, timeout_);
    std::vector<Request> requests;
    for (size_t index = 0; index < local.size(); ++index) {
      const int64_t offset = owner.offsets[parameter_of(local[index])];
      requests.push_back({owner.number, offset, static_cast<int64_t>(targets[index].nbytes())});
    }
    send_all(owner.socket, {{requests.data(), requests.size() * sizeof(Request)}}, stop_);
    for (const at::Tensor& target : targets)
      receive(owner, static_cast<std::byte*>(target.data_ptr()), target.nbytes());
  } catch (const Stopped&) {
    owner.socket = {};
    throw RotationError(named("the ring was closed"));
  } catch (const RingTimeout& error) {
    owner.socket = {};
    throw RingTimeout(named(error.what()));
  } catch (const RotationError& error) {
    owner.socket = {};  // what arrives later belongs to no pull
    throw RotationError(named(error.what()));
  }
}

void PulledShards::receive(Owner& owner, std::byte* data, size_t bytes) const {
  const bool any = receive_all(owner.socket, data, bytes, [&] {
    if (!wait_ready(owner.socket, POLLIN, stop_, timeout_)) {
      throw RingTimeout(concat("nothing arrived for ", std::chrono::duration<double>(timeout_).count(), " s"));
    }
  });
  if (!any) throw ConnectionError("it has ended, or closed its ring");
}

// The thread that accepts connections.
void PulledShards::accept() {
  try {
    while (true) {
      if (!wait_ready(listener_, POLLIN, stop_, kWake)) continue;
      Socket socket = accept_at(listener_);
      if (!socket) continue;
      const std::lock_guard lock(mutex_);
      answering_.emplace_back([this, socket = std::move(socket)] { answer(socket); });
    }
  } catch (const Stopped&) {
  } catch (const RotationError&) {  // the listener failed: ranks that connect later get an error
  }
}

// A thread that answers the requests of one connection, and ends with it.
void PulledShards::answer(const Socket& socket) {
  try {
    Request request;
    auto* text = reinterpret_cast<std::byte*>(&request);
    while (receive_all(socket, text, sizeof request, [&] { wait_ready(socket, POLLIN, stop_, kWake); })) {
      const bool inside = request.number == number() && request.offset >= 0 && request.bytes >= 0 &&
                          request.offset <= own_bytes() && request.bytes <= own_bytes() - request.offset;
      if (!inside) return;  // not a rank of this ring
      send_all(socket, {{own_data() + request.offset, static_cast<size_t>(request.bytes)}}, stop_);
    }
  } catch (const Stopped&) {
  } catch (const RotationError&) {  // the other rank has ended, or left the connection
  }
}

void PulledShards::close() noexcept {
  raise_stop(stop_);
  if (accepting_.joinable()) accepting_.join();
  for (std::thread& thread : answering_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace rtp
