// Memory rules of rotation: the layout of a slot, the cut of shards into chunks, the slots that a pass leases, and the
// resulting size of the pools. The engine applies them to memory, the planner to sizes. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "schedule/operations.h"
#include "schedule/schedule.h"

namespace rtp {

inline constexpr int64_t kSlotCap = int64_t{64} << 20;  // bytes; default of a ring

// Over shm, hops of at most so many bytes wait in a mailbox of their receiver, which has so many entries for each
// sender and channel. An entry keeps the memory that a message has used.
inline constexpr int64_t kMostSmall = int64_t{64} << 10;
inline constexpr uint32_t kMailboxDepth = 8;

// Rounds up to a multiple of 64 bytes, where the tensors of a slot begin: a cache line, and enough for any vector load.
int64_t aligned(int64_t bytes);

// Returns the bytes of `tensors` tensors that lie one after the other in a slot. `bytes_of(tensor)`: bytes of a single
// tensor.
template <typename Bytes>
int64_t packed_bytes(size_t tensors, Bytes&& bytes_of) {
  int64_t total = 0;
  for (size_t tensor = 0; tensor < tensors; ++tensor) total += aligned(bytes_of(tensor));
  return total;
}

// How local shards may be sent and received.
struct Movement {
  bool cast = false;  // they travel in another dtype than they are stored in
  bool sends_anywhere = true;
  bool receives_anywhere = true;

  // Returns whether local shards may travel in place. A cast copy travels out of place in any case, and if hops can
  // arrive in slots only, the return of a shard would take another slot and a copy.
  bool in_place() const { return !cast && sends_anywhere && receives_anywhere; }
  // Returns whether a copy in an additional slot travels instead.
  bool staged(bool hops) const { return cast || (hops && !sends_anywhere); }
};

struct SlotCount {
  int64_t slots = 0;        // existing slots
  int64_t bytes = 0;        // their bytes
  int64_t peak_slots = 0;   // maximum number of slots leased at once
  int64_t peak_bytes = 0;   // maximum bytes that existed at once
  int64_t allocations = 0;  // total number of allocations
};

// The slots of one channel: selects the slot of a lease and counts. `Memory` allocates a slot with `allocate(bytes)`
// and frees it with `release(slot)`, returns its `bytes(slot)` and whether it is `movable(slot)`, and orders free slots
// of equal size by `before(a, b)`; ties are resolved in the order in which slots were returned.
template <typename Slot>
class SlotLedger {
 public:
  // Leases the smallest free slot that is large enough. If all are too small, the largest movable one is replaced by a
  // new slot.
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

  // Releases all free slots.
  template <typename Memory>
  void clear(Memory&& memory) {
    for (; !free_.empty(); free_.pop_back()) release(free_.back(), memory);
  }

  void reset_peak() {
    count_.peak_slots = leased_;
    count_.peak_bytes = count_.bytes;
  }
  const SlotCount& count() const { return count_; }
  int64_t changes() const { return changes_; }  // total allocations and releases
  const std::vector<Slot>& free() const { return free_; }

 private:
  template <typename Memory>
  void release(const Slot& slot, Memory&& memory) {
    const int64_t bytes = memory.bytes(slot);
    memory.release(slot);  // may throw
    count_.bytes -= bytes;
    --count_.slots, ++changes_;
  }

  std::vector<Slot> free_;
  int64_t leased_ = 0;
  int64_t changes_ = 0;
  SlotCount count_;
};

struct StepSize {
  int ranks = 1;
  Movement movement;
  bool in_place = false;
  int64_t compute_bytes = 4;  // bytes of an element of a travelling weight
  int64_t reduce_bytes = 4;   // bytes of an element of a travelling gradient
  int64_t slot_cap = kSlotCap;
  int late = 0;                           // number of gradient reductions that may finish after their pass
  bool prefetch = true;                   // whether hops of weights are posted ahead
  std::optional<int64_t> look_ahead = 0;  // bytes ahead: see LookAhead; nothing: as for `auto`
  Route route = Route::ring;
  int group = 1;  // shards in a product, at most, of operations that take groups
  int hosts = 1;  // number of hosts, for route two_level
  GradientRoute gradient_route = GradientRoute::chain;
  int64_t sum_bytes = 4;  // gradient route direct only: bytes of an element of the owner's gradient
  bool gradients_quantized = false;
  bool gradients_apart = false;
  TravelFormat travel = TravelFormat::plain;  // of weights
  bool halves = false;                        // gradients travel in two halves, unless they take the direct route
  bool collective = false;                    // groups of all shards travel by collectives

  bool quantizes_weight(const OperationFacts& operation, size_t parameter) const {
    return ranks > 1 && !operation.is_bias(parameter) && !operation.parameters[parameter].codes &&
           quantizes(travel, compute_bytes);
  }
  TravelFormat gradient_travel() const {
    return direct_gradients() && gradients_quantized ? TravelFormat::int8 : TravelFormat::plain;
  }
  bool direct_gradients() const { return gradient_route == GradientRoute::direct; }
  bool narrow() const { return direct_gradients() && (gradients_quantized || reduce_bytes < sum_bytes); }
  int64_t widest() const { return std::max({compute_bytes, reduce_bytes, direct_gradients() ? sum_bytes : 0}); }
};

// The size of a ring's pools once steps of these operations repeat. `free`: bytes of every slot at the end of a step.
struct Footprint {
  SlotCount weight, gradient, scratch;  // scratch: of dequantized weights
  std::vector<int64_t> free_weight, free_gradient;
  int64_t mailboxes = 0;  // bytes that messages use in mailboxes, at most, as if one were small; over shm only
};
// `operations` are in forward order; backward runs them in reverse.
Footprint footprint(const std::vector<OperationFacts>& operations, const StepSize& step);

// Bytes of one parameter that rank `rank` sends in a step of one forward and one backward.
struct Sent {
  int64_t forward = 0, backward = 0, gradient = 0;
};
std::vector<Sent> traffic(const OperationFacts& operation, const StepSize& step, int rank);

}  // namespace rtp
