// Flags in device memory with which streams of different ranks wait for each other.
#pragma once

#ifdef RTP_WITH_CUDA

#include <cstdint>
#include <optional>
#include <string>

#include "device/copy_engine.h"
#include "schedule/schedule.h"
#include "transport/ce/peer_memory.h"

namespace rtp {

// Returns why streams cannot wait for memory values; nothing if they can.
std::optional<std::string> stream_wait_refusal();

// The flags of one rank, each 0 or 1. A flag is identified by its channel, its kind, the shard and its slot that the
// peer accesses, and the raising rank, so that no two conversations share a flag: neither weights and gradients, nor
// hops of one slot with different peers (route direct), nor shards, or halves, that one slot holds at the same time,
// nor the two directions between two ranks.
class PeerFlags {
 public:
  // The memory that a hop accesses across ranks.
  struct Place {
    Channel channel;
    int slot;
    int shard;
    bool second = false;  // the second half of a gradient that travels in halves
  };

  enum class Kind : uint8_t {
    offer,  // raised by the owner of a slot: the peer may access it
    done,   // raised by the peer: it has accessed the slot
  };

  static constexpr int kSlots = 64;  // maximum slots per channel: as many as may be ahead (LookAhead), and more

  // Collective, on the current device; all flags are 0. `side`: a stream on which the constructor runs raise_all()
  // once. The first use of a copy may make the driver load code, which waits for all streams; later, such a wait could
  // deadlock.
  PeerFlags(const PeerMemory& peers, const at::Tensor& memory, int rank, int ranks, int shards, cudaStream_t side);

  // Returns the bytes of the flags on each of `ranks` ranks for `shards` shards.
  static int64_t bytes(int ranks, int shards);

  // Enqueues setting this rank's flag at `peer` to 1. `captured`: whether the stream takes part in a capture.
  void raise(Kind kind, const Place& place, int peer, const CopyEngine& engine, cudaStream_t stream,
             bool captured) const;
  // Enqueues waiting until the flag of `peer` is 1, and resetting it to 0.
  void await(Kind kind, const Place& place, int peer, cudaStream_t stream) const;

  // For give_up(): enqueues setting all flags of this rank to 1, which ends one wait of each stream.
  void raise_all(cudaStream_t stream) const;
  // Returns the number of flags that are 1 now.
  int64_t raised() const;

  PeerRegion& region() { return region_; }

 private:
  static int64_t count(int ranks, int shards);
  int64_t flag(Kind kind, const Place& place, int raiser) const;
  uint32_t* word(int rank, int64_t index) const { return reinterpret_cast<uint32_t*>(region_.bases[rank]) + index; }

  void* batch_mem_op_;  // cuStreamBatchMemOp
  int rank_;
  int ranks_;
  int shards_;
  int64_t flags_;  // number of flags; an equal number of words with value 1 follows
  PeerRegion region_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
