// What rotation takes of memory: how a slot is laid out, where shards are cut in pieces, which slots a pass leases, and
// what a pool then holds. The engine follows these rules with memory, the planner with sizes alone. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "schedule/schedule.h"

namespace rtp {

inline constexpr int64_t kSlotCap = int64_t{64} << 20;  // bytes, where a ring is given none

// The rows of an owner's shard when `extent` rows are cut for `ranks` ranks, and those of all: the chunk rule of
// DTensor's Shard, ceil(extent / ranks) rows each, the last shards smaller or empty.
int64_t shard_size(int64_t extent, int ranks, int owner);
std::vector<int64_t> shard_sizes(int64_t extent, int ranks);

// The rows of a shard that travel together: the first one, and how many.
struct Rows {
  int64_t first, count;
};
Rows half_rows(Half half, int64_t rows);

// How the shards of one operation are cut where the largest is above the slot cap: `rows` rows in each piece, the last
// fewer. At least one piece.
struct Chunks {
  int64_t rows, count;

  Rows of(int64_t chunk, int64_t shard_rows) const;
};
// `most`: rows of the largest shard. `row_bytes`: of one of them, while it travels. `cap`: bytes; 0: none.
Chunks cut_in_chunks(int64_t most, int64_t row_bytes, int64_t cap);

// Parts of a slot begin at multiples of 64 bytes: a cache line, and any vector load.
int64_t aligned(int64_t bytes);

// Bytes that `parts` parts take in a slot, one after the other; that is where the next one begins. `bytes_of(part)`:
// its own.
template <typename Bytes>
int64_t packed_bytes(size_t tensors, Bytes&& bytes_of) {
  int64_t total = 0;
  for (size_t tensor = 0; tensor < tensors; ++tensor) total += aligned(bytes_of(tensor));
  return total;
}

// What weights travel in: in what they are computed with, or in fewer bits, widened again in front of every product.
enum class Wire : uint8_t { plain, bfloat16, int8 };

// Whether that has fewer bits than a number of `compute_bytes`, and the bytes of so many numbers. In 8 bits they have
// scales of their own, as base/quantized.h says.
bool quantizes(Wire wire, int64_t compute_bytes);
int64_t wire_bytes(int64_t numbers, Wire wire, int64_t compute_bytes);

// Where local shards may leave from and land.
struct Travel {
  bool cast = false;  // they travel in another dtype
  bool sends_anywhere = true;
  bool receives_anywhere = true;

  // Whether they may travel themselves, in place. A cast copy travels out of place in any case, and where hops can land
  // in slots only, bringing a shard home takes a slot and a copy more.
  bool in_place() const { return !cast && sends_anywhere && receives_anywhere; }
  // Whether a copy leaves instead, from one more slot.
  bool staged(bool hops) const { return cast || (hops && !sends_anywhere); }
};

// What a pass can return before its compute at `position`: the weight slots that nothing names any more, and whether
// the staged copy of the local shard is among them. Nothing while weight hops are due or more than one slot is in use:
// the next pass's first shard then leaves too early.
struct Spare {
  std::vector<int> slots;
  bool staged = false;
};
std::optional<Spare> spare_before(const Schedule& schedule, size_t position, bool staged);

struct SlotCount {
  int64_t slots = 0;        // that exist
  int64_t bytes = 0;        // of these
  int64_t peak_slots = 0;   // most that were leased at once
  int64_t peak_bytes = 0;   // most bytes that existed at once
  int64_t allocations = 0;  // ever made
};

// The slots of one channel: which one a lease takes, and what they count. `Memory` makes a slot of some bytes with
// `allocate(bytes)`, unmakes it with `release(slot)`, knows its `bytes(slot)` and whether it is `movable(slot)`, and
// which of two free ones of one size goes `before` the other; where neither does, the one that was given back first.
template <typename Slot>
class SlotLedger {
 public:
  // The smallest free slot that is large enough. Where all are too small, the largest that may go makes way for a new
  // one.
  template <typename Memory>
  Slot lease(int64_t bytes, Memory&& memory) {
    std::stable_sort(free_.begin(), free_.end(), [&](const Slot& a, const Slot& b) {
      return memory.bytes(a) != memory.bytes(b) ? memory.bytes(a) < memory.bytes(b) : memory.before(a, b);
    });
    const auto found =
        std::find_if(free_.begin(), free_.end(), [&](const Slot& slot) { return memory.bytes(slot) >= bytes; });
    Slot slot{};
    if (found != free_.end()) {
      slot = std::move(*found);
      free_.erase(found);
    } else {
      const auto small = std::find_if(free_.rbegin(), free_.rend(), [&](const Slot& s) { return memory.movable(s); });
      if (small != free_.rend()) {
        release(*small, memory);
        free_.erase(std::next(small).base());
      }
      slot = memory.allocate(bytes);
      count_.bytes += memory.bytes(slot);
      ++count_.slots;
      ++count_.allocations, ++changes_;
      count_.peak_bytes = std::max(count_.peak_bytes, count_.bytes);
    }
    count_.peak_slots = std::max(count_.peak_slots, ++leased_);
    return slot;
  }

  void give_back(Slot slot) {
    --leased_;
    free_.push_back(std::move(slot));
  }

  // Unmakes all free slots.
  template <typename Memory>
  void clear(Memory&& memory) {
    for (; !free_.empty(); free_.pop_back()) release(free_.back(), memory);
  }

  void reset_peak() {
    count_.peak_slots = leased_;
    count_.peak_bytes = count_.bytes;
  }
  const SlotCount& count() const { return count_; }
  int64_t changes() const { return changes_; }  // slots ever made and unmade
  const std::vector<Slot>& free() const { return free_; }

 private:
  template <typename Memory>
  void release(const Slot& slot, Memory&& memory) {
    const int64_t bytes = memory.bytes(slot);
    memory.release(slot);  // may refuse
    count_.bytes -= bytes;
    --count_.slots, ++changes_;
  }

  std::vector<Slot> free_;
  int64_t leased_ = 0;
  int64_t changes_ = 0;
  SlotCount count_;
};

// One rotated operation in numbers: the largest shard of everything that travels together.
struct OperationSize {
  struct TensorSize {
    int64_t rows;
    int64_t row_elements;
    bool in_backward;  // it travels in backward too
  };
  std::vector<TensorSize> tensors;
  bool bundle = false;         // its weight gradients need what its input gradients compute
  bool in_chunks = false;      // it travels in pieces where it is above the slot cap
  std::vector<size_t> biases;  // the places of parts that never travel in fewer bits than they are computed with
  bool deferred = true;        // its gradients may land late, where the step lets them

  bool is_bias(size_t tensor) const { return std::find(biases.begin(), biases.end(), tensor) != biases.end(); }
  Chunks chunks(int64_t element_bytes, int64_t cap) const;
};

struct StepSize {
  int ranks = 1;
  Travel travel;
  bool in_place = false;
  int64_t compute_bytes = 4;  // of a number of a weight that travels
  int64_t reduce_bytes = 4;   // and of a gradient
  int64_t slot_cap = kSlotCap;
  int deferred = 0;  // gradients that may land after the pass that they are of
  Route route = Route::ring;
  int hosts = 1;  // of route two_level
  GradientRoute gradient_route = GradientRoute::chain;
  int64_t sum_bytes = 4;  // of gradient route direct: of a number of a gradient at home
  bool gradients_quantized = false;
  Wire wire = Wire::plain;  // of weights

  bool direct_gradients() const { return gradient_route == GradientRoute::direct; }
  bool rounded() const { return direct_gradients() && (gradients_quantized || reduce_bytes < sum_bytes); }
  int64_t widest() const { return std::max({compute_bytes, reduce_bytes, direct_gradients() ? sum_bytes : 0}); }
};

// What the pools of a ring hold once steps of these operations repeat. `free`: bytes of every slot at the end of a
// step.
struct Footprint {
  SlotCount weight, gradient, scratch;  // scratch: places where weights are widened
  std::vector<int64_t> free_weight, free_gradient;
};
// The operations are in the order of forward; backward runs them in reverse.
Footprint footprint(const std::vector<OperationSize>& operations, const StepSize& step);

}  // namespace rtp
