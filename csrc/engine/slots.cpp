#include "engine/slots.h"

#include <algorithm>

namespace rtp {

void wait(Transfer& transfer, End end) {
  if (end == End::received) {
    transfer.wait_received();
  } else {
    transfer.wait_sent();
  }
}

void Usage::settle(Lanes& lanes) {
  before_write([](const auto& transfer, End end) { wait(*transfer, end); },
               [&](const Mark& mark) { lanes.order_compute_after(mark); });
  *this = Usage{};
}

std::shared_ptr<Slot> SlotPool::lease(Channel channel, int64_t bytes) {
  const size_t kind = static_cast<size_t>(channel);
  auto& free = free_[kind];
  Count& count = counts_[kind];
  std::stable_sort(free.begin(), free.end(),
                   [](const auto& a, const auto& b) { return a->memory.numel() < b->memory.numel(); });
  auto found =
      std::find_if(free.begin(), free.end(), [bytes](const auto& slot) { return slot->memory.numel() >= bytes; });
  if (found == free.end()) {  // all free slots are too small: the largest makes way for a larger one
    const auto small = std::find_if(free.rbegin(), free.rend(), [](const auto& slot) { return !slot->captured; });
    if (small != free.rend()) {
      release(channel, *small);
      free.erase(std::next(small).base());
      found = free.end();
    }
  }
  std::shared_ptr<Slot> slot;
  if (found != free.end()) {
    slot = *found;
    free.erase(found);
  } else {
    slot = std::make_shared<Slot>(Slot{transport_->allocate(channel, bytes), {}, false});
    count.bytes += slot->memory.numel();
    ++count.slots;
    ++count.allocations;
    count.peak_bytes = std::max(count.peak_bytes, count.bytes);
  }
  slot->captured = slot->captured || transport_->lanes().capture() != 0;
  count.peak_slots = std::max(count.peak_slots, ++leased_[kind]);
  return slot;
}

void SlotPool::give_back(Channel channel, std::shared_ptr<Slot> slot) {
  --leased_[static_cast<size_t>(channel)];
  free_[static_cast<size_t>(channel)].push_back(std::move(slot));
}

void SlotPool::release(Channel channel, const std::shared_ptr<Slot>& slot) {
  slot->usage.settle(transport_->lanes());
  transport_->release(channel, slot->memory);  // may refuse
  Count& count = counts_[static_cast<size_t>(channel)];
  count.bytes -= slot->memory.numel();
  --count.slots;
}

void SlotPool::clear() {
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    auto& free = free_[static_cast<size_t>(channel)];
    for (; !free.empty(); free.pop_back()) release(channel, free.back());
  }
}

void SlotPool::reset_peak() {
  for (size_t kind = 0; kind < counts_.size(); ++kind) {
    counts_[kind].peak_slots = leased_[kind];
    counts_[kind].peak_bytes = counts_[kind].bytes;
  }
}

}  // namespace rtp
