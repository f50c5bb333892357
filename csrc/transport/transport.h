// The interface between the executor and a transport, which moves bytes to a neighbour.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "schedule/schedule.h"
#include "transport/sink.h"

namespace rtp {

// One contiguous part of a message. Both ends have the same sizes; an empty part is not sent.
struct Span {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// The memory of this rank that a hop uses: it sends from its source and receives into its target.
enum class HopMemory : uint8_t { source, target };

// One hop of this rank: `send` leaves for `to` while `receive` is filled from `from`. Or, as `action` says, a gather or
// scatter between all ranks (`to` and `from` are kAllRanks), in place: of every part, `receive` of a gather and `send`
// of a scatter hold an equal piece for each rank, the other one is the piece of this rank. A scatter adds numbers of
// `dtype`.
struct Hop {
  Channel channel = Channel::weight;
  Action action = Action::hop;
  at::ScalarType dtype = at::kByte;
  bool in_parts = false;   // it uses parts of a slot, where other data lie between its spans
  bool two_level = false;  // of a schedule of two levels: both neighbours are on this host, or neither is
  int to = 0;
  int from = 0;
  std::vector<Span> send;
  std::vector<Span> receive;
  std::byte* send_slot = nullptr;     // start of the slot that contains `send`; null: a local tensor
  std::byte* receive_slot = nullptr;  // start of the slot that contains `receive`
  // Byte offsets of every part: of `send` in the receiving slot of `to`, and of `receive` in the sending slot of
  // `from`. All ranks of a ring use the same slots for the same hops.
  std::vector<size_t> remote_receive_offsets;
  std::vector<size_t> remote_send_offsets;
  int send_shard = 0;  // the shards that leave and arrive, by owner
  int receive_shard = 0;
  bool second_half = false;  // of these
  // for messages
  std::string operation;
  int index = 0;
  int count = 0;  // 0: stands for all hops of a pass that is enqueued as a graph; kCollective: see Hops::meet
  // How often optimizers have updated the parameters before this hop, as its rank counts.
  uint64_t updates = 0;

  static constexpr int kCollective = -1;
  static constexpr int kAllRanks = -1;

  std::string describe() const;
  // Returns an identity that is equal on both ends of a hop and differs from those of nearby hops.
  uint64_t identity() const;
  // The bytes that this rank sends. In a gather its piece goes to all other ranks, in a scatter all pieces but its own:
  // of algorithms that send no more.
  uint64_t bytes_sent() const;
};

// Says which hop the bytes of a message belong to, so that ranks that are out of step detect it.
struct HopToken {
  uint64_t identity = 0;
  uint64_t updates = 0;
  int32_t index = 0;
  int32_t count = 0;
  Channel channel = Channel::weight;
  std::array<char, 151> operation{};  // cut where it is longer, and ends with a zero

  static HopToken of(const Hop& hop);
  // Throws RotationError, which names both hops, if `peer` has another hop than `hop`. `does`: sent, or expects.
  void expect(const Hop& hop, int peer, const char* does) const;
};

// Adjacent parts of a hop that travel in one transfer: `bytes` at `data` here, and at offset `there` in a slot of the
// neighbour.
struct Block {
  std::byte* data = nullptr;
  size_t bytes = 0;
  size_t there = 0;
};

// Returns the blocks of one side of a hop. Parts that are adjacent at both ends, except for padding, form one block;
// both ends compute the same blocks. `in_parts`: as in Hop; the gaps between spans are not padding.
std::vector<Block> blocks_of(const std::vector<Span>& parts, const std::vector<size_t>& there, bool in_parts);

// A hop in flight. Waiting orders the compute stream (the host on CPU, the current stream on CUDA) after it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void wait_received() = 0;  // the received data may be read, and its memory written
  virtual void wait_sent() = 0;      // the sent memory may be overwritten
  // The arrival time, if a host transport records it. Null before the arrival and if unknown.
  virtual Moment arrived() const { return nullptr; }

  // The event of one end, for which streams can wait. Null on the host.
  virtual StreamEvent event(End) const { return nullptr; }

  // Tells `sink` of the waits for this hop, of `event`.
  void record(Sink& sink, EventHandle event) { sink_ = &sink, event_ = std::move(event); }
  void wait(End end) {
    const auto run = [&] { end == End::received ? wait_received() : wait_sent(); };
    sink_ != nullptr ? sink_->waiting(event_, end, *this, run) : run();
  }

 private:
  Sink* sink_ = nullptr;
  EventHandle event_;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;

  // Starts a hop. Every rank posts the same hops of a channel in the same order.
  virtual std::unique_ptr<Transfer> post(const Hop& hop) = 0;

  // Orders its streams after an event; no effect on the host, where the caller waits. First all later hops of a
  // channel, second only the use of one memory by `hop`, the next one, here and by peers.
  virtual void order_hops_after(Channel, const StreamEvent&) {}
  virtual void order_memory_after(const Hop& hop, HopMemory, const StreamEvent& event) {
    order_hops_after(hop.channel, event);
  }
  // The current point of the stream of a hop, for traces. Null on the host, where a Transfer reports the arrival.
  virtual Moment moment(const Hop&) { return nullptr; }
  // For race tests: delays `hop`, the next one.
  virtual void delay(const Hop& hop, std::chrono::microseconds time);

  // Returns whether a rank may enqueue a pass as a graph while other ranks enqueue its hops one by one. If not, passes
  // cannot be graphs.
  virtual bool takes_graphs() const { return false; }
  // Called before and after the graph of a pass is enqueued; `end` is the event after it.
  virtual void before_graph() {}
  virtual void after_graph(const std::string&, const StreamEvent&) {}

  // The streams of the computes. Transports of one ring share them.
  Streams& streams() const { return *streams_; }
  const std::shared_ptr<Streams>& shared_streams() const { return streams_; }

  // The number of SMs that a hop of one channel takes while it runs; 0: none, or not known.
  virtual int multiprocessors() const { return 0; }

  // Returns whether hops may be gathers and scatters.
  virtual bool has_collectives() const { return false; }

  // Returns whether the send and the receive of a hop must be posted together, because neither returns, or ends,
  // without calls of the peer that the other one may have to come before.
  virtual bool joint() const { return false; }

  // Returns whether every neighbour is this rank itself, so that no other rank waits for it.
  virtual bool loopback() const { return false; }

  // Allocates and releases slots. Every rank allocates and releases the same slots in the same order; no hop is in
  // flight in a released slot. sends_anywhere and receives_anywhere return whether hops can also use other memory.
  virtual at::Tensor allocate(Channel channel, int64_t bytes) = 0;
  virtual void release(Channel, const at::Tensor&) {}
  virtual bool sends_anywhere() const { return true; }
  virtual bool receives_anywhere() const { return true; }
  // The maximum number of tensors per hop.
  virtual size_t most_tensors() const { return std::numeric_limits<size_t>::max(); }
  // The maximum number of slots of a channel.
  virtual int64_t most_slots() const { return std::numeric_limits<int64_t>::max(); }

  // Aborts: ends all waits here and at the neighbours, and drops the connections. Idempotent.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Closes in good order, with no hop in flight. Idempotent.
  virtual void close() = 0;
  // Throws RotationError if close() would wait for CUDA graphs that the user holds.
  virtual void expect_no_graphs() const {}
  // Ends a ring that was not closed, with no hop of this rank in flight. Neighbours may still be running.
  virtual void drop() noexcept {
    try {
      close();
    } catch (...) {
      abort("dropped");
    }
  }

 protected:
  explicit Transport(std::shared_ptr<Streams> streams = std::make_shared<Streams>()) : streams_(std::move(streams)) {}

 private:
  const std::shared_ptr<Streams> streams_;
};

// Makes a transport that only the creating process destroys. The copy in a forked process is leaked: its threads do not
// exist there, and its connections and memory belong to the creator.
template <typename Made, typename... Arguments>
std::shared_ptr<Made> make_owned(Arguments&&... arguments) {
  return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...), [owner = getpid()](Made* made) {
    if (getpid() == owner) delete made;
  });
}

// Throws the error for a neighbour, or one of all ranks, that does not answer.
[[noreturn]] void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited,
                                const std::string& cause);

}  // namespace rtp
