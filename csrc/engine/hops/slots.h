// What travels together, the slots that it travels through, and the hops from one to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "engine/hops/trace.h"
#include "schedule/footprint.h"
#include "schedule/uses.h"
#include "transport/transport.h"

namespace rtp {

// One tensor of a bundle: the dtype that it is computed with, its shape for every owner, and what it travels in.
struct TensorLayout {
  at::ScalarType dtype;
  std::vector<std::vector<int64_t>> shapes;
  Wire wire = Wire::plain;

  int64_t elements(int owner) const;
  bool quantized() const;  // whether it travels in fewer bits
  // While it travels: a tensor of this dtype and shape, flat bytes where they hold scales too.
  at::ScalarType wire_dtype() const;
  std::vector<int64_t> wire_shape(int owner) const;
  int64_t bytes(int owner) const;
  int64_t whole_bytes() const;
  // Of what is widened, in a place for that: nothing where it travels as it is computed with.
  int64_t dequantized_bytes(int owner) const;
};

// Tensors that travel together, and this rank's own ones. In a slot the parts of one shard lie one after the other; in
// a slot of all shards, the rows of all owners of each part do.
struct ShardBundle {
  std::vector<TensorLayout> layouts;
  std::vector<at::Tensor> local;

  int64_t offset(int owner, size_t index) const;  // in bytes, in a slot
  int64_t slot_bytes() const;                     // of a slot that any owner's shard fits into
  int64_t whole_offset(int owner, size_t index) const;
  int64_t whole_bytes() const;
  int64_t dequantized_offset(int owner, size_t index) const;  // in a place where what travels narrow is widened
  int64_t dequantized_bytes() const;

  // As they travel.
  at::Tensor in_slot(const at::Tensor& memory, int owner, size_t index) const;
  at::Tensor in_whole(const at::Tensor& memory, int owner, size_t index) const;  // owner may be kAllOwners
  // A local tensor, seen as the shard of `owner` while that passes through it.
  at::Tensor local_view(int owner, int rank, size_t index) const;
  // As it is computed with, in a place for what is widened.
  at::Tensor dequantized(const at::Tensor& place, int owner, size_t index) const;

  // Copies the local tensors into `memory`, laid out as in a slot, cast or quantized, and lets the copies take their
  // place. What is undefined is not copied.
  void stage(Streams& streams, const at::Tensor& memory, int rank);
  bool cast() const;  // whether a local tensor is another than what travels of it

  // The same for one half of the rows of every shard.
  ShardBundle rows(Half half, int rank) const;
};

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors);

// Who has touched a piece of memory since it was last overwritten.
struct Usage : Uses<std::shared_ptr<Transfer>, StreamEvent> {
  // Orders the compute lane after everything.
  void settle(Streams& streams);
};

// Orders the compute lane after one end of a hop.
void wait(Transfer& transfer, End end);

// A slot remembers its uses, so that it can go to the next pass before they have ended.
struct Slot {
  at::Tensor memory;
  Usage usage;
  bool captured = false;  // a graph of the user knows it: it stays where it is until the pool is cleared
  int64_t number = 0;     // of its kind, in the order in which they were made

  std::byte* data() const { return static_cast<std::byte*>(memory.data_ptr()); }
};

// Memory that shards travel through, shared by all layers of a ring: see SlotLedger.
class SlotPool {
 public:
  SlotPool(std::shared_ptr<Transport> transport, at::Device device)
      : transport_(std::move(transport)), device_(device) {}

  std::shared_ptr<Slot> lease(Channel channel, int64_t bytes);
  void give_back(Channel channel, std::shared_ptr<Slot> slot) { ledger(channel).give_back(std::move(slot)); }
  void clear();
  // Places that no hop uses, so that a rank may have more of them than another.
  std::shared_ptr<Slot> lease_scratch(int64_t bytes);
  void give_back_scratch(std::shared_ptr<Slot> slot) { scratch_.give_back(std::move(slot)); }

  const SlotCount& count(Channel channel) const { return ledgers_[static_cast<size_t>(channel)].count(); }
  const SlotCount& scratch_count() const { return scratch_.count(); }
  void reset_peak();

  // From now on which slots a pass gets follows from which are free, and not from what ran before: ranks whose passes
  // come out of graphs, which lease nothing, and ranks that lease use the same.
  void fix_order() { fixed_ = true; }
  // Changes with every slot that is made or unmade: what a graph knows of slots is true as long as it is the same.
  int64_t generation() const { return ledgers_[0].changes() + ledgers_[1].changes() + scratch_.changes(); }

 private:
  using Ledger = SlotLedger<std::shared_ptr<Slot>>;
  bool captured_by_user() const;
  Ledger& ledger(Channel channel) { return ledgers_[static_cast<size_t>(channel)]; }

  std::shared_ptr<Transport> transport_;
  at::Device device_;
  std::array<Ledger, 2> ledgers_;
  Ledger scratch_;
  bool fixed_ = false;
};

// Posts the hops of one ring, and counts them.
class Hops {
 public:
  Hops(std::shared_ptr<Transport> transport, Trace& trace) : transport_(std::move(transport)), trace_(trace) {}

  // Posts a hop after whoever wrote its source, and whoever uses its target, and enters it in both. `traced`: the event
  // to time.
  std::shared_ptr<Transfer> post(const Hop& hop, Usage& source, Usage& target, const EventHandle& traced);

  // For race tests: holds up every hop by a random time of at most this.
  void set_delay(std::chrono::microseconds most) { delay_ = most; }

  int64_t count(Channel channel) const { return counts_[static_cast<size_t>(channel)]; }
  int64_t bytes_sent(Channel channel) const { return bytes_[static_cast<size_t>(channel)]; }

  // What a pass has added to both counts.
  struct Counts {
    std::array<int64_t, 2> hops{}, bytes{};
  };
  Counts counts() const { return {counts_, bytes_}; }
  // Of a pass that was enqueued as a graph; and of one that was captured and did not run.
  void add(const Counts& pass, int times);

 private:
  std::shared_ptr<Transport> transport_;
  Trace& trace_;
  std::chrono::microseconds delay_{0};
  std::minstd_rand random_{std::random_device{}()};
  std::array<int64_t, 2> counts_{};
  std::array<int64_t, 2> bytes_{};
};

}  // namespace rtp
