// Shards of several hosts with several ranks each: mapped inside a host, pulled between hosts, once for a host where
// its ranks are near each other in time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/shards/pulled_shards.h"

namespace rtp {

// The two slots that a rank pulls into lie in memory that the other ranks of its host, its mates, can read. Before it
// pulls a shard it looks whether a mate has that shard in a slot, or is pulling it, and then copies it from there.
//
// No rank waits for another one's calls. A mate overwrites its slots whenever it likes: a copy that it has disturbed
// counts for nothing (the sequence number of the slot tells), and a rank pulls by itself where a mate's pull makes no
// progress. A slot can be copied from during the forward that filled it only, so that no rank reads old shards.
//
// Each shard has a claim in the memory of the host's first rank: the newest rank that has pulled it or is doing so. It
// is a hint that keeps two ranks from pulling the same shard at the same time; the slots decide.
class TwoLevelShards : public PulledShards {
 public:
  // `hosts`: their number, each of as many consecutive ranks. `most`: bytes of the largest memory of a rank.
  // `parameters`: their number.
  TwoLevelShards(int rank, int ranks, int64_t bytes, const std::string& host, std::chrono::milliseconds timeout,
                 int hosts, int64_t most, int64_t parameters);
  ~TwoLevelShards() override { close(); }

  int hosts() const override { return hosts_; }
  std::string address() const override;
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override;
  at::Tensor allocate(int64_t bytes) override;
  void end_forward() override;

 protected:
  void fetch(const Task& task) override;
  bool asks_ahead() const override { return false; }  // a mate may have the shard by then

 private:
  static constexpr size_t kSlots = 2;

  // The state of a slot. The sequence number is odd while the slot is written.
  struct Landing {
    std::atomic<uint64_t> sequence;
    std::atomic<uint64_t> shard;    // identity; 0: nothing to copy
    std::atomic<uint64_t> arrived;  // bytes
  };
  // The shared memory of a rank: this, the claims, and the slots.
  struct Board {
    uint64_t number;
    std::array<Landing, kSlots> landings;
  };
  using Claim = std::atomic<uint32_t>;  // rank + 1; 0: none
  enum class Copied { yes, not_yet, never };

  static Board& board_of(const SharedMemory& memory) { return *reinterpret_cast<Board*>(memory.data()); }
  size_t slots_begin() const;
  std::byte* slot_of(const SharedMemory& memory, size_t slot) const {
    return memory.data() + slots_begin() + slot * most_;
  }
  Claim& claim(size_t index) const;
  size_t claim_of(const Task& task) const;
  size_t slot_with(const Task& task) const;  // kSlots: not in a slot of the board

  bool copy_from_mate(const Task& task, uint64_t shard, bool claims);
  Copied copy_from(int mate, const Task& task, uint64_t shard, uint64_t& arrived);
  void open(size_t slot, const Task& task, uint64_t shard);
  void publish(size_t slot);
  void withdraw(size_t slot);

  const int hosts_;
  const int first_;  // rank of this host
  const size_t most_;
  const size_t claims_;
  std::shared_ptr<SharedMemory> own_board_;
  std::vector<SharedMemory> boards_;  // of the ranks of this host; empty for this one
  std::shared_ptr<std::array<std::atomic<bool>, kSlots>> taken_;
  std::mutex landing_mutex_;  // guards the landings of this rank
  std::array<size_t, kSlots> claimed_{};
};

}  // namespace rtp
