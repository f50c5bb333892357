#include "engine/shards/two_level_shards.h"

#include <ATen/ops/from_blob.h>
#include <poll.h>

#include <cstring>
#include <sstream>

#include "base/checks.h"
#include "schedule/footprint.h"

namespace rtp {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(1);        // between two looks at the slot of a mate
constexpr auto kPatience = std::chrono::milliseconds(200);  // with a mate's pull that makes no progress

// FNV-1a of an owner and its parameters that travel together.
uint64_t identity_of(int owner, const std::vector<size_t>& parameters) {
  constexpr uint64_t kBasis = 14695981039346656037u, kPrime = 1099511628211u;
  uint64_t identity = (kBasis ^ static_cast<uint64_t>(owner)) * kPrime;
  for (const size_t parameter : parameters) identity = (identity ^ parameter) * kPrime;
  return identity;
}

}  // namespace

TwoLevelShards::TwoLevelShards(int rank, int ranks, int64_t bytes, const std::string& host,
                               std::chrono::milliseconds timeout, int hosts, int64_t most, int64_t parameters)
    : PulledShards(rank, ranks, bytes, host, timeout),
      hosts_(hosts),
      first_(rank - rank % (ranks / hosts)),
      most_(static_cast<size_t>(aligned(most))),
      claims_(static_cast<size_t>(parameters) * static_cast<size_t>(ranks)),
      // pages exist once they are written
      own_board_(std::make_shared<SharedMemory>(SharedMemory::numbered(slots_begin() + kSlots * most_))),
      boards_(static_cast<size_t>(ranks / hosts)),
      taken_(std::make_shared<std::array<std::atomic<bool>, kSlots>>()) {}

size_t TwoLevelShards::slots_begin() const {
  return static_cast<size_t>(aligned(static_cast<int64_t>(sizeof(Board) + claims_ * sizeof(Claim))));
}

std::string TwoLevelShards::address() const {
  return concat(map_address(), '|', MemoryAddress(*own_board_).text(), '|', PulledShards::address());
}

void TwoLevelShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                             const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  std::vector<std::string> sockets;
  for (int peer = 0; peer < ranks(); ++peer) {
    std::istringstream fields(addresses[peer]);
    std::string shards, board, socket;
    std::getline(fields, shards, '|'), std::getline(fields, board, '|'), std::getline(fields, socket);
    sockets.push_back(socket);
    const int mate = peer - first_;
    if (peer == rank() || mate < 0 || mate >= static_cast<int>(boards_.size())) continue;
    map(peer, shards, bytes[peer]);
    boards_[mate] = map_numbered(board, own_board_->bytes(), /*writable=*/mate == 0, concat("slots of rank ", peer));
  }
  PulledShards::connect(sockets, bytes, offsets);
}

at::Tensor TwoLevelShards::allocate(int64_t bytes) {
  if (static_cast<size_t>(bytes) > most_) return {};
  for (size_t slot = 0; slot < kSlots; ++slot) {
    if ((*taken_)[slot].exchange(true)) continue;
    const auto release = [board = own_board_, taken = taken_, slot](void*) { (*taken)[slot] = false; };
    return at::from_blob(slot_of(*own_board_, slot), {bytes}, release, at::kByte);
  }
  return {};
}

TwoLevelShards::Claim& TwoLevelShards::claim(size_t index) const {
  const SharedMemory& memory = rank() == first_ ? *own_board_ : boards_.front();
  return reinterpret_cast<Claim*>(memory.data() + sizeof(Board))[index];
}

size_t TwoLevelShards::claim_of(const Task& task) const {
  return task.parameters.front() * static_cast<size_t>(ranks()) + static_cast<size_t>(task.owner);
}

size_t TwoLevelShards::slot_with(const Task& task) const {
  const auto* start = static_cast<const std::byte*>(task.targets.front().data_ptr());
  for (size_t slot = 0; slot < kSlots; ++slot) {
    const std::byte* begin = slot_of(*own_board_, slot);
    if (start >= begin && start < begin + most_) return slot;
  }
  return kSlots;
}

void TwoLevelShards::fetch(const Task& task) {
  const uint64_t shard = identity_of(task.owner, task.parameters);
  const size_t slot = slot_with(task);
  const bool shares = slot < kSlots;
  if (shares) open(slot, task, shard);
  try {
    if (!copy_from_mate(task, shard, shares)) {
      receive(task, [&](size_t arrived) {
        if (shares) board_of(*own_board_).landings[slot].arrived = arrived;
      });
    }
  } catch (...) {
    if (shares) withdraw(slot);
    throw;
  }
  if (shares) publish(slot);
}

// Copies a shard from a mate that has it, or claims it if `claims`, and returns false: this rank has to pull it.
bool TwoLevelShards::copy_from_mate(const Task& task, uint64_t shard, bool claims) {
  Claim& claim = this->claim(claim_of(task));
  const auto me = static_cast<uint32_t>(rank() + 1);
  auto moved = std::chrono::steady_clock::now();
  uint64_t arrived = 0, before = 0;
  uint32_t seen = 0;
  while (true) {
    uint32_t holder = claim.load();
    if (holder == 0 || holder == me) {
      if (!claims || claim.compare_exchange_strong(holder, me)) return false;
      continue;
    }
    const Copied copied = copy_from(static_cast<int>(holder) - 1, task, shard, arrived);
    const auto now = std::chrono::steady_clock::now();
    if (std::exchange(seen, holder) != holder || std::exchange(before, arrived) != arrived) moved = now;
    if (copied == Copied::yes) {
      if (claims) claim.compare_exchange_strong(holder, me);  // this rank will have it longest
      return true;
    }
    if (copied == Copied::never || now - moved > kPatience) {
      if (!claims || claim.compare_exchange_strong(holder, me)) return false;
      continue;
    }
    wait_ready(Socket(), 0, interrupt(), kPoll);
  }
}

TwoLevelShards::Copied TwoLevelShards::copy_from(int mate, const Task& task, uint64_t shard, uint64_t& arrived) {
  const SharedMemory& memory = boards_[static_cast<size_t>(mate - first_)];
  for (size_t slot = 0; slot < kSlots; ++slot) {
    const Landing& landing = board_of(memory).landings[slot];
    const uint64_t sequence = landing.sequence.load();
    if (landing.shard.load() != shard) continue;
    if (sequence % 2 == 1) {
      arrived = landing.arrived.load();
      return Copied::not_yet;
    }
    const auto* start = static_cast<const std::byte*>(task.targets.front().data_ptr());
    int64_t bytes = 0;
    for (const at::Tensor& target : task.targets) {
      auto* to = static_cast<std::byte*>(target.data_ptr());
      std::memcpy(to, slot_of(memory, slot) + (to - start), target.nbytes());
      bytes += static_cast<int64_t>(target.nbytes());
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (landing.sequence.load() != sequence || landing.shard.load() != shard) return Copied::never;
    shared_bytes_ += bytes;
    return Copied::yes;
  }
  return Copied::never;
}

// Marks a slot as being written. Mates that see the claim of this rank find the mark.
void TwoLevelShards::open(size_t slot, const Task& task, uint64_t shard) {
  withdraw(slot);
  const std::lock_guard lock(landing_mutex_);
  Landing& landing = board_of(*own_board_).landings[slot];
  landing.sequence += 1;
  landing.arrived = 0;
  landing.shard = shard;
  claimed_[slot] = claim_of(task);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void TwoLevelShards::publish(size_t slot) {
  const std::lock_guard lock(landing_mutex_);
  board_of(*own_board_).landings[slot].sequence += 1;
}

void TwoLevelShards::withdraw(size_t slot) {
  const std::lock_guard lock(landing_mutex_);
  Landing& landing = board_of(*own_board_).landings[slot];
  if (landing.shard.exchange(0) == 0) return;
  landing.sequence += landing.sequence % 2 == 1 ? 1 : 2;
  auto me = static_cast<uint32_t>(rank() + 1);
  claim(claimed_[slot]).compare_exchange_strong(me, 0);
}

void TwoLevelShards::end_forward() {
  for (size_t slot = 0; slot < kSlots; ++slot) {
    if (board_of(*own_board_).landings[slot].sequence % 2 == 0) withdraw(slot);
  }
}

}  // namespace rtp
