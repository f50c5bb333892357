// How bytes reach a neighbour. The executor knows only this interface.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "schedule/schedule.h"
#include "transport/recorder.h"

namespace rtp {

// One contiguous piece of a message. Both ends know the sizes; a piece of no bytes is not sent.
struct Span {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// One hop of this rank: `send` leaves for `to` while `receive` is filled from `from`.
struct Hop {
  Channel channel = Channel::weight;
  bool among_others = false;  // it lands in the slot of all shards, where other owners' lie between its parts
  int to = 0;
  int from = 0;
  std::vector<Span> send;
  std::vector<Span> receive;
  std::byte* send_slot = nullptr;     // the slot that `send` lies in, at its start; null: it lies in a local tensor
  std::byte* receive_slot = nullptr;  // the same of `receive`
  // In bytes, part by part: where `send` lands in the receiving slot of `to`, and where `receive` lies in the sending
  // slot of `from`. The ranks of a ring use their slots alike.
  std::vector<size_t> lands_at;
  std::vector<size_t> leaves_from;
  // for messages
  std::string operation;
  int index = 0;
  int count = 0;  // 0: all hops of a pass that is enqueued as a graph

  std::string describe() const;
  // The same on both ends of a hop, and for no other one near it.
  uint64_t identity() const;
};

// Parts of a hop that go in one transfer: `bytes` at `data` here, and at an offset in a slot of the neighbour.
struct Block {
  std::byte* data = nullptr;
  size_t bytes = 0;
  size_t there = 0;
};

// What one side of a hop moves. Parts that follow each other at both ends, but for padding, go together; both ends of a
// hop come to the same blocks. `among_others`: as in Hop. What lies between parts is not padding then.
std::vector<Block> blocks_of(const std::vector<Span>& parts, const std::vector<size_t>& there, bool among_others);

// A hop in flight. Waiting orders the compute lane (the host on CPU, the current stream on CUDA) after it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait_received() = 0;  // what arrived may be read, and the memory may be written
  virtual void wait_sent() = 0;      // what left may be overwritten
  // When it arrived, where a transport of the host can tell. Null before it has, and where nobody knows.
  virtual Moment arrived() const { return nullptr; }

  // What waits for it tells this recorder, under that number.
  void record(Recorder& recorder, uint64_t number) { recorder_ = &recorder, number_ = number; }
  void wait(End end) {
    const auto run = [&] { end == End::received ? wait_received() : wait_sent(); };
    recorder_ != nullptr ? recorder_->waiting(number_, end, run) : run();
  }

 private:
  Recorder* recorder_ = nullptr;
  uint64_t number_ = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;

  // Starts a hop. Every rank posts the same hops of a channel in the same order.
  virtual std::unique_ptr<Transfer> post(const Hop& hop) = 0;

  // Whether a rank may enqueue a pass as a graph while others enqueue its hops one by one; else none may.
  virtual bool takes_graphs() const { return false; }
  // Before a graph of a pass is enqueued, and after, where `end` is the mark behind it.
  virtual void before_graph() {}
  virtual void after_graph(const std::string&, const StreamEvent&) {}

  // Where its hops run beside computes.
  Streams& streams() const { return *lanes_; }
  // Orders a channel's next hop after one end of an earlier hop. By default the host waits.
  virtual void order_channel_after_received(Channel, Transfer& transfer) { transfer.wait(End::received); }
  virtual void order_channel_after_sent(Channel, Transfer& transfer) { transfer.wait(End::sent); }

  // Whether every neighbour is this rank itself, so that nobody else waits for it.
  virtual bool alone() const { return false; }

  // Memory of a slot, and whether hops can start from and land in other memory too. Every rank allocates and releases
  // the same slots in the same order; nothing is in flight in a slot that is released.
  virtual at::Tensor allocate(Channel channel, int64_t bytes) = 0;
  virtual void release(Channel, const at::Tensor&) {}
  virtual bool sends_anywhere() const { return true; }
  virtual bool receives_anywhere() const { return true; }
  // The most tensors that may travel together.
  virtual size_t most_tensors() const { return std::numeric_limits<size_t>::max(); }

  // Gives up: wakes whoever waits here or at a neighbour, and drops the connections. Idempotent.
  virtual void abort(const std::string& reason) noexcept = 0;
  // The orderly end, with nothing in flight. Idempotent.
  virtual void close() = 0;
  // The end of a ring that nobody closed, with nothing in flight here. Neighbours may still be at work.
  virtual void drop() noexcept {
    try {
      close();
    } catch (...) {
      abort("dropped");
    }
  }

 protected:
  explicit Transport(std::unique_ptr<Streams> streams = std::make_unique<Streams>()) : lanes_(std::move(streams)) {}

 private:
  const std::unique_ptr<Streams> lanes_;
};

// A transport that only the process that made it takes down. Its copy in a forked process is left as it is: the threads
// that it would wait for do not exist there, and what it would close is still the other's.
template <typename Made, typename... Arguments>
std::shared_ptr<Made> make_owned(Arguments&&... arguments) {
  return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...), [owner = getpid()](Made* made) {
    if (getpid() == owner) delete made;
  });
}

// The error for a neighbour that does not answer.
[[noreturn]] void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited,
                                const std::string& cause);

}  // namespace rtp
