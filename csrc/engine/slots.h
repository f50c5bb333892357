// Memory that shards travel through, shared by all layers of a ring.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <vector>

#include "schedule/uses.h"
#include "transport/transport.h"

namespace rtp {

// Who has touched a piece of memory since it was last overwritten.
struct Usage : Uses<std::shared_ptr<Transfer>, Mark> {
  // Orders the compute lane after everything.
  void settle(Lanes& lanes);
};

// Orders the compute lane after one end of a hop.
void wait(Transfer& transfer, End end);

// A slot remembers its uses, so that it can go to the next pass before they have ended.
struct Slot {
  at::Tensor memory;
  Usage usage;
  bool captured = false;  // a graph knows it: it stays where it is until the pool is cleared

  std::byte* data() const { return static_cast<std::byte*>(memory.data_ptr()); }
};

// Slots of one ring, shared by all its layers. Counts what it holds and what was ever leased at once.
class SlotPool {
 public:
  explicit SlotPool(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  std::shared_ptr<Slot> lease(Channel channel, int64_t bytes);
  void give_back(Channel channel, std::shared_ptr<Slot> slot);
  void clear();

  struct Count {
    int64_t slots = 0;        // slots that exist
    int64_t bytes = 0;        // bytes of the slots that exist
    int64_t peak_slots = 0;   // most slots leased at once
    int64_t peak_bytes = 0;   // most bytes that existed at once
    int64_t allocations = 0;  // slots ever allocated
  };
  Count count(Channel channel) const { return counts_[static_cast<size_t>(channel)]; }
  void reset_peak();

 private:
  void release(Channel channel, const std::shared_ptr<Slot>& slot);

  std::shared_ptr<Transport> transport_;
  std::array<std::vector<std::shared_ptr<Slot>>, 2> free_;
  std::array<int64_t, 2> leased_{};
  std::array<Count, 2> counts_;
};

}  // namespace rtp
