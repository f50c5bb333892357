// Bundles of tensors that travel together, the slots that they travel through, and the hops between slots.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/blocks.h"
#include "schedule/footprint.h"
#include "schedule/uses.h"
#include "transport/transport.h"

namespace rtp {

// One tensor of a bundle: its compute dtype, its shape for every owner, and its travel format.
struct TensorLayout {
  at::ScalarType dtype;
  std::vector<std::vector<int64_t>> shapes;
  TravelFormat travel = TravelFormat::plain;
  std::optional<BlockFormat> frozen = std::nullopt;  // the local tensor itself holds blocks, which travel unchanged

  bool operator==(const TensorLayout&) const = default;
  int64_t elements(int owner) const;
  bool quantized() const;                  // whether it travels in fewer bits than the compute dtype
  bool casts(at::ScalarType local) const;  // whether a local tensor of this dtype differs from the travel format
  // Dtype and shape while it travels; flat bytes if the format includes scales.
  at::ScalarType wire_dtype() const;
  std::vector<int64_t> wire_shape(int owner) const;
  int64_t bytes(int owner) const;
  Rows rows(int owner, Half half) const;  // a scalar is one row
  int64_t bytes_of(int owner, int64_t rows) const;
  int64_t bytes_before(int owner, Half half) const { return bytes_of(owner, rows(owner, half).first); }
  // Bytes of the dequantized tensor in scratch memory; 0 if it travels in the compute dtype.
  int64_t dequantized_bytes(int owner) const;
};

// [Note: order in a slot]
// The tensors of one shard lie one after the other, weights before biases, so that weights that multiply the same input
// lie side by side and are one operand of a product, as long as their bytes are a multiple of what a tensor is aligned
// to. In a slot of several shards, the rows of consecutive owners are contiguous for each tensor.

// Some shards in a slot: those of `owners` owners from `first` on, modulo the ranks. In a slot of several shards, they
// lie from `place` on.
struct Place {
  int first;
  int owners = 1;
  int shards = 1;
  int place = 0;
};

class ShardCodes;

// Tensors that travel together, and this rank's local ones: see [Note: order in a slot].
struct ShardBundle {
  std::vector<TensorLayout> layouts;
  std::vector<at::Tensor> local;
  // A weight travels transposed, on all ranks: the local tensor is a view, even where its few rows are contiguous.
  bool turned = false;
  // The codes among the local tensors, and which parameter of the pass each follows: see [Note: codes].
  struct Coded {
    std::shared_ptr<ShardCodes> codes;
    size_t parameter;
  };
  std::vector<Coded> codes;

  int64_t offset(const Place& place, size_t index) const;  // byte offset in a slot
  // Slot size that fits so many shards of any owners, or two halves apart.
  int64_t slot_bytes(int shards = 1, bool halved = false) const;
  int64_t half_offset(Half half, size_t index) const;         // byte offset of a half in a slot with halves apart
  int64_t dequantized_offset(int owner, size_t index) const;  // byte offset in dequantized scratch memory
  int64_t dequantized_bytes() const;

  // Views in the travel format.
  at::Tensor in_slot(const at::Tensor& memory, const Place& place, size_t index) const;
  at::Tensor half_in_slot(const at::Tensor& memory, int owner, Half half, size_t index) const;
  // View of a local tensor as the shard of `owner`, while that shard passes through it.
  at::Tensor local_view(int owner, int rank, size_t index) const;
  // Views of all tensors in a slot; null: the local tensors.
  std::vector<at::Tensor> views(const Place& place, int rank, const struct Slot* slot) const;
  // View of a dequantized tensor in scratch memory.
  at::Tensor dequantized(const at::Tensor& place, int owner, size_t index) const;

  // Copies the local tensors into `memory`, in the layout of a slot, cast or quantized, and replaces them with the
  // copies. Undefined tensors are not copied.
  void stage(Streams& streams, const at::Tensor& memory, int rank);
  bool cast() const;  // whether a local tensor differs from its travel format
};

// Returns a half of the rows of a tensor. A scalar is one row.
at::Tensor half_of(const at::Tensor& whole, Half half);

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors);

// Returns the hop of a step, the `index`-th of its channel in its pass, without its memory.
Hop hop_of(const Schedule& schedule, const Step& step, std::string operation, int index);
// Returns where the shards of `owners` owners from `owner` on are in a buffer.
Place place_of(const Schedule& schedule, const Buffer& buffer, int owner, int owners = 1);
// Sets the memory of a hop on this rank, and its offsets in the buffers of the neighbours.
void set_memory(Hop& hop, const Schedule& schedule, const Step& step, const ShardBundle& bundle,
                const std::vector<at::Tensor>& send, const std::vector<at::Tensor>& receive);

// Sets the memory of a gather or scatter in a slot: every tensor has a piece for each rank, as large as the largest
// shard.
void set_collective_memory(Hop& hop, const Schedule& schedule, const ShardBundle& bundle, const at::Tensor& slot);

// The uses of a memory region since it was last overwritten.
struct Usage : Uses<std::shared_ptr<Transfer>, StreamEvent> {
  // Orders the compute stream after all uses, and clears them.
  void wait_for_all(Streams& streams);
};

// Orders the compute stream after one end of a hop.
void wait(Transfer& transfer, End end);

// A slot keeps its uses, so that the next pass can lease it before they have ended.
struct Slot {
  at::Tensor memory;
  Usage usage;
  bool captured = false;  // a graph of the user refers to it: it must not be freed before the pool is cleared
  int64_t number = 0;     // number in order of allocation, by channel

  std::byte* data() const { return static_cast<std::byte*>(memory.data_ptr()); }
};

// [Note: slots]
// A shard travels through slots, which all layers of a ring share. A pass leases those of gradients when it begins, and
// each of weights with the first hop into it, perhaps before it begins. It gives them back when the last step that uses
// them is enqueued, not when it has run: a slot keeps its uses, the hops and computes that may still read or write it,
// and the next pass that leases it waits for exactly those. Hops are posted in the order of the schedule on every
// rank, so that the rank that sends and the one that receives need no word about which slot is meant. A rank whose
// slots are all in use delays its own hops, and the neighbour's no further than the slots that have already arrived.

// The memory that shards travel through, shared by all layers of a ring: see SlotLedger and [Note: slots].
class SlotPool {
 public:
  SlotPool(std::shared_ptr<Transport> transport, at::Device device)
      : transport_(std::move(transport)), device_(device) {}

  // Asks `memory` for the memory of new slots first; an undefined tensor: it has none.
  void take_memory_from(std::function<at::Tensor(int64_t)> memory) { memory_ = std::move(memory); }
  std::shared_ptr<Slot> lease(Channel channel, int64_t bytes);
  void give_back(Channel channel, std::shared_ptr<Slot> slot) { ledger(channel).give_back(std::move(slot)); }
  void clear();
  // Orders the compute stream after the uses of all free slots of a channel. A pass that goes on after it and leases
  // such a slot is ordered after settled(); settles() counts.
  void settle(Channel channel);
  const StreamEvent& settled() const { return settled_; }
  int64_t settles() const { return settles_; }
  // Scratch memory that no hop uses, so its amount may differ between ranks.
  std::shared_ptr<Slot> lease_scratch(int64_t bytes);
  void give_back_scratch(std::shared_ptr<Slot> slot) { scratch_.give_back(std::move(slot)); }

  const SlotCount& count(Channel channel) const { return ledgers_[static_cast<size_t>(channel)].count(); }
  const SlotCount& scratch_count() const { return scratch_.count(); }
  void reset_peak();

  // From now on, the slots that a pass gets depend only on which slots are free, not on earlier passes: ranks that
  // replay graphs, which lease nothing, and ranks that lease use the same slots.
  void fix_order() { fixed_ = true; }
  // Changes with every allocation and release of a slot. A graph is valid as long as the generation is unchanged.
  int64_t generation() const { return ledgers_[0].changes() + ledgers_[1].changes() + scratch_.changes(); }

 private:
  using Ledger = SlotLedger<std::shared_ptr<Slot>>;
  bool captured_by_user() const;
  Ledger& ledger(Channel channel) { return ledgers_[static_cast<size_t>(channel)]; }

  std::shared_ptr<Transport> transport_;
  at::Device device_;
  std::function<at::Tensor(int64_t)> memory_;
  std::array<Ledger, 2> ledgers_;
  Ledger scratch_;
  bool fixed_ = false;
  StreamEvent settled_;
  int64_t settles_ = 0;
};

// Posts and counts the hops of one ring.
class Hops {
 public:
  Hops(std::shared_ptr<Transport> transport, Sink& sink) : transport_(std::move(transport)), sink_(sink) {}

  // Posts a hop after the last write of its sources and all uses of its targets, and records it in them. `traced`: the
  // trace event of the hop. `pass`, `position`: of the step that posts it, in the trace.
  std::shared_ptr<Transfer> post(Hop& hop, const std::vector<Usage*>& sources, const std::vector<Usage*>& targets,
                                 const EventHandle& traced, const PassHandle& pass, int position);

  // Returns once the previous rank of the ring has come to the same collective, on the host: a hop without contents.
  void meet(const std::string& collective, int rank, int ranks);
  // An optimizer has updated parameters. All updates between two hops count as one: ranks may have divided the
  // parameters among different numbers of optimizers.
  void count_update() { updated_ = true; }

  // For race tests: delays every hop by a random time of at most `most`.
  void set_delay(std::chrono::microseconds most) { delay_ = most; }

  int64_t count(Channel channel) const { return counts_[static_cast<size_t>(channel)]; }
  int64_t bytes_sent(Channel channel) const { return bytes_[static_cast<size_t>(channel)]; }

  // The hops and bytes that a pass added.
  struct Counts {
    std::array<int64_t, 2> hops{}, bytes{};
  };
  Counts counts() const { return {counts_, bytes_}; }
  // Adds the counts of a pass that was enqueued as a graph, or subtracts those of a pass that was captured and did not
  // run.
  void add(const Counts& pass, int times);

 private:
  // Sets what the token of a hop says about this rank.
  void mark(Hop& hop);

  std::shared_ptr<Transport> transport_;
  Sink& sink_;
  uint64_t updates_ = 0;
  bool updated_ = false;  // since the last hop
  at::Tensor meeting_;    // what a collective's hop sends, and where one arrives
  std::chrono::microseconds delay_{0};
  std::minstd_rand random_{std::random_device{}()};
  std::array<int64_t, 2> counts_{};
  std::array<int64_t, 2> bytes_{};
};

}  // namespace rtp
