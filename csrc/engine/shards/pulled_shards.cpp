#include "engine/shards/pulled_shards.h"

#include <poll.h>

#include <algorithm>
#include <sstream>
#include <utility>

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

}  // namespace

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
      host_(host),
      timeout_(timeout),
      stop_(make_stop()),
      interrupt_(make_stop()),
      listener_(listen_at(host, ranks)),
      accepting_([this] { accept(); }) {}

std::string PulledShards::address() const { return concat(port_of(listener_), ' ', number(), ' ', host_); }

void PulledShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  for (const std::string& address : addresses) {
    Owner owner;
    std::istringstream fields(address);
    fields >> owner.port >> owner.number >> owner.host;
    RTP_CHECK_VALUE(!fields.fail(), "pulled shards: expected 'port number host', got '", address, "'");
    owners_.push_back(std::move(owner));
  }
  set_all_offsets(offsets);
  pulling_ = std::thread([this] { run(); });
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

// Sends the request of a pull. Requires the mutex, and the connection.
void PulledShards::ask(Queued& pull) {
  Owner& owner = owners_[pull.task.owner];
  std::vector<Request> requests;
  for (size_t index = 0; index < pull.task.targets.size(); ++index) {
    const auto bytes = static_cast<int64_t>(pull.task.targets[index].nbytes());
    requests.push_back({owner.number, offsets_of(pull.task.owner)[pull.task.parameters[index]], bytes});
  }
  send_all(owner.connection.socket(), {{requests.data(), requests.size() * sizeof(Request)}}, interrupt_);
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
  ended_.wait(lock, [&] { return pull.ended || closing_; });
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
    return concat("a pull of shards from rank ", task.owner, " of the ring at ", owner.host, ": ", what...);
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
      Incoming made(connect_to(owner.host, owner.port, interrupt_, timeout_));
      const std::lock_guard lock(mutex_);
      owner.connection = std::move(made);
    }
    std::vector<iovec> buffers;
    for (const at::Tensor& target : task.targets) {
      if (target.nbytes() > 0) buffers.push_back({target.data_ptr(), target.nbytes()});
    }
    {
      const std::lock_guard lock(mutex_);
      for (const auto& each : queue_) {  // the running pull is the first
        if (each->task.owner != task.owner || (each != queue_.front() && !asks_ahead())) break;
        if (!each->asked) ask(*each);
      }
    }
    size_t before = 0;
    const auto count = [&](size_t received) {
      pulled_bytes_ += static_cast<int64_t>(received - std::exchange(before, received));
      progress(received);
    };
    if (!owner.connection.receive_all(std::move(buffers), interrupt_, count, timeout_)) {
      throw ConnectionError("it has ended, or closed its ring");
    }
  } catch (const Stopped&) {
    left();
    throw;
  } catch (const RingTimeout& error) {
    left();
    throw RingTimeout(named(error.what()));
  } catch (const RotationError& error) {
    left();
    throw RotationError(named(error.what()));
  }
}

// The thread that accepts connections.
void PulledShards::accept() {
  try {
    while (true) {
      if (!wait_ready(listener_, POLLIN, stop_, kWake)) continue;
      Socket socket = accept_at(listener_);
      if (!socket) continue;
      const std::lock_guard lock(mutex_);
      answering_.remove_if([](Answering& each) {
        if (each.ended) each.thread.join();
        return each.ended;
      });
      Answering& one = answering_.emplace_back();
      one.thread = std::thread([this, &one, socket = std::move(socket)]() mutable {
        answer(std::move(socket));
        const std::lock_guard lock(mutex_);
        one.ended = true;
      });
    }
  } catch (const Stopped&) {
  } catch (const RotationError&) {  // the listener failed: ranks that connect later get an error
  }
}

// A thread that answers the requests of one connection, and ends with it.
void PulledShards::answer(Socket socket) {
  try {
    Incoming connection(std::move(socket));
    Request request;
    while (true) {
      if (!wait_ready(connection.socket(), POLLIN, stop_, kWake)) continue;
      if (!connection.receive_all({{&request, sizeof request}}, stop_, [](size_t) {})) return;
      const bool inside = request.number == number() && request.offset >= 0 && request.bytes >= 0 &&
                          request.offset <= own_bytes() && request.bytes <= own_bytes() - request.offset;
      if (!inside) return;  // not a rank of this ring
      send_all(connection.socket(), {{own_data() + request.offset, static_cast<size_t>(request.bytes)}}, stop_);
    }
  } catch (const Stopped&) {
  } catch (const RotationError&) {  // the other rank has ended, or left the connection
  }
}

void PulledShards::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  raise_stop(stop_);
  raise_stop(interrupt_);
  queued_.notify_all();
  ended_.notify_all();
  if (accepting_.joinable()) accepting_.join();
  if (pulling_.joinable()) pulling_.join();
  for (Answering& each : answering_) {
    if (each.thread.joinable()) each.thread.join();
  }
}

}  // namespace rtp
