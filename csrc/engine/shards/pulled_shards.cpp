#include "engine/shards/pulled_shards.h"

#include <poll.h>

#include <algorithm>
#include <ios>
#include <utility>

#include "base/checks.h"
#include "base/crc32c.h"
#include "base/signals.h"
#include "base/threads.h"

namespace rtp {
namespace {

constexpr auto kWake = std::chrono::hours(1);  // longest sleep of a thread that waits for requests

}  // namespace

// A request for one part of the owner's memory.
struct PulledShards::Request {
  int64_t offset;
  int64_t bytes;

  bool operator==(const Request&) const = default;
};

// Precedes the bytes.
struct PulledShards::Answer {
  Request of;
  uint64_t checksum;
};

class PulledShards::Queued : public Pull {
 public:
  Queued(PulledShards& source, Task task) : task(std::move(task)), source_(source) {}

  void wait() override { source_.wait(*this); }
  void drop() noexcept override { source_.drop(*this); }

  const Task task;
  bool asked = false;  // the request was sent on the current connection
  bool ended = false;  // guarded by the mutex of the source, as are all
  bool given_up = false;
  std::exception_ptr failure;

 private:
  PulledShards& source_;
};

PulledShards::PulledShards(int rank, int ranks, int64_t bytes, const std::string& host,
                           std::chrono::milliseconds timeout)
    : HostShards(rank, ranks, bytes),
      timeout_(timeout),
      interrupt_(make_stop()),
      peers_(rank, ranks, host, [](const Lost&) {}),
      owners_(static_cast<size_t>(ranks)) {}

std::string PulledShards::address() const { return peers_.address(); }

void PulledShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  set_all_offsets(offsets);
  peers_.join(addresses, timeout_);
  for (int peer = 0; peer < ranks(); ++peer) {
    if (!maps(peer)) answering_.push_back(start_thread([this, peer] { answer(peer); }));
  }
  pulling_ = start_thread([this] { run(); });
}

std::shared_ptr<Pull> PulledShards::pull(const std::vector<size_t>& parameters, int owner,
                                         const std::vector<at::Tensor>& targets) {
  auto pull = std::make_shared<Queued>(*this, Task{parameters, owner, targets});
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(pull);
    const Queued& running = *queue_.front();
    if (asks_ahead() && queue_.size() == 2 && running.asked && running.task.owner == owner && !owners_[owner].left) {
      try {
        ask(*pull);
      } catch (const RotationError&) {  // the connection has ended, which the pull finds at its turn
      }
    }
  }
  queued_.notify_one();
  return pull;
}

std::vector<PulledShards::Request> PulledShards::requests_of(const Task& task) const {
  std::vector<Request> requests;
  for (size_t index = 0; index < task.targets.size(); ++index) {
    const auto bytes = static_cast<int64_t>(task.targets[index].nbytes());
    if (bytes > 0) requests.push_back({offsets_of(task.owner)[task.parameters[index]], bytes});
  }
  return requests;
}

// Sends the requests of a pull. Requires the mutex, and the connection.
void PulledShards::ask(Queued& pull) {
  std::vector<Request> requests = requests_of(pull.task);
  const Socket& socket = owners_[pull.task.owner].connection.socket();
  send_all(socket, {{requests.data(), requests.size() * sizeof(Request)}}, interrupt_);
  pull.asked = true;
}

// Ends a connection, since what arrives later belongs to no pull. Requires the mutex.
void PulledShards::leave(int owner) {
  owners_[owner].connection = {};
  owners_[owner].left = false;
  for (const auto& each : queue_) each->asked = each->asked && each->task.owner != owner;
}

void PulledShards::wait(Queued& pull) {
  std::unique_lock lock(mutex_);
  constexpr auto kAlways = std::chrono::steady_clock::time_point::max();
  wait_until(ended_, lock, kAlways, [&] { return pull.ended || closing_; });
  if (pull.failure) std::rethrow_exception(pull.failure);
  if (!pull.ended) throw RotationError(concat("a pull of shards from rank ", pull.task.owner, ": the ring was closed"));
}

void PulledShards::drop(Queued& pull) noexcept {
  std::unique_lock lock(mutex_);
  if (pull.ended || closing_) return;
  if (queue_.front().get() != &pull) {
    owners_[pull.task.owner].left |= pull.asked;
    queue_.erase(std::find_if(queue_.begin(), queue_.end(), [&](const auto& each) { return each.get() == &pull; }));
    pull.ended = true;
    return;
  }
  pull.given_up = true;
  raise_stop(interrupt_);
  ended_.wait(lock, [&] { return pull.ended || closing_; });
}

// The thread of this rank's pulls.
void PulledShards::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    const std::shared_ptr<Queued> pull = queue_.front();
    lock.unlock();
    try {
      fetch(pull->task);
    } catch (const Stopped&) {  // the failure is that of the ring's end, if anything waits for it
    } catch (const std::exception&) {
      pull->failure = std::current_exception();
    }
    lock.lock();
    if (closing_) return;
    if (pull->given_up) lower_stop(interrupt_);
    pull->ended = true;
    queue_.pop_front();
    ended_.notify_all();
  }
}

void PulledShards::receive(const Task& task, const std::function<void(size_t)>& progress) {
  Owner& owner = owners_[task.owner];
  const auto named = [&](const auto&... what) {
    return concat("a pull of shards from ", peers_.describe(task.owner), ": ", what...);
  };
  const auto left = [&] {
    const std::lock_guard lock(mutex_);
    leave(task.owner);
  };
  try {
    {
      const std::lock_guard lock(mutex_);
      if (owner.left) leave(task.owner);
    }
    if (!owner.connection) {
      Incoming made(peers_.connect(task.owner, Channel::weight, interrupt_, timeout_));
      const std::lock_guard lock(mutex_);
      owner.connection = std::move(made);
    }
    const std::vector<Request> requests = requests_of(task);
    std::vector<Answer> answers(requests.size());
    std::vector<iovec> buffers;
    for (const at::Tensor& target : task.targets) {
      if (target.nbytes() == 0) continue;
      buffers.push_back({&answers[buffers.size() / 2], sizeof(Answer)});
      buffers.push_back({target.data_ptr(), target.nbytes()});
    }
    {
      const std::lock_guard lock(mutex_);
      for (const auto& each : queue_) {  // the running pull is the first
        if (each->task.owner != task.owner || (each != queue_.front() && !asks_ahead())) break;
        if (!each->asked) ask(*each);
      }
    }
    if (!owner.connection.receive_all(buffers, interrupt_, progress, timeout_)) {
      throw ConnectionError("it has ended, or closed its ring");
    }
    for (size_t index = 0; index < requests.size(); ++index) {
      const iovec& data = buffers[2 * index + 1];
      const Answer &got = answers[index], sent{requests[index], crc32c(data.iov_base, data.iov_len)};
      if (got.of != sent.of)
        throw RotationError(
            concat("the answer to another request: expected ", sent.of.bytes, " bytes, got ", got.of.bytes));
      if (got.checksum != sent.checksum) {
        throw RotationError(concat("what arrived is not what it sent: expected the checksum ", std::hex, got.checksum,
                                   ", got ", sent.checksum));
      }
      pulled_bytes_ += sent.of.bytes;
    }
  } catch (const Stopped&) {
    left();
    throw;
  } catch (const RingTimeout& error) {
    left();
    throw RingTimeout(named(error.what()));
  } catch (const ConnectionError& error) {
    left();
    throw RotationError(named(peers_.reason_of_loss(task.owner, error.what())));
  } catch (const RotationError& error) {
    left();
    throw RotationError(named(error.what()));
  }
}

// A thread that answers the requests of one rank, which opens a new connection where it has given a pull up.
void PulledShards::answer(int peer) {
  while (true) {
    try {
      Incoming connection(peers_.accept(peer, Channel::weight));
      try {
        serve(connection);
      } catch (const RotationError&) {  // it has left the connection
      }
    } catch (const Stopped&) {
      return;
    } catch (const std::exception&) {  // it has ended
      return;
    }
  }
}

void PulledShards::serve(Incoming& connection) {
  Request request;
  while (true) {
    if (!wait_ready(connection.socket(), POLLIN, peers_.stop(), kWake)) continue;
    if (!connection.receive_all({{&request, sizeof request}}, peers_.stop(), [](size_t) {})) return;
    const bool inside = request.offset >= 0 && request.bytes >= 0 && request.offset <= own_bytes() &&
                        request.bytes <= own_bytes() - request.offset;
    if (!inside) return;  // not of this ring's shards
    const auto bytes = static_cast<size_t>(request.bytes);
    std::byte* const data = own_data() + request.offset;
    Answer answer{request, crc32c(data, bytes)};
    send_all(connection.socket(), {{&answer, sizeof answer}, {data, bytes}}, peers_.stop());
  }
}

void PulledShards::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  peers_.announce(PeerState::closed, "");
  peers_.leave();
  raise_stop(interrupt_);
  queued_.notify_all();
  ended_.notify_all();
  if (pulling_.joinable()) pulling_.join();
  for (std::thread& each : answering_) {
    if (each.joinable()) each.join();
  }
}

}  // namespace rtp
