// Flags in device memory by which the streams of one rank wait for those of another.
#pragma once

#ifdef RTP_WITH_CUDA

#include <cstdint>
#include <optional>
#include <string>

#include "device/copy_engine.h"
#include "schedule/schedule.h"
#include "transport/ce/peer_memory.h"

namespace rtp {

// Why streams cannot wait for values in memory here; nothing if they can.
std::optional<std::string> stream_wait_refusal();

// The words of one rank, each 0 or 1. A flag is named by its channel, its kind, the slot that the data lands in, and
// the rank that raises it, so that no two conversations share one: not weights with gradients, not hops of one slot
// with different peers (route direct), not the two directions between two ranks.
class PeerFlags {
 public:
  enum class Kind : uint8_t {
    data,    // raised by the sender: push, the data has landed; pull, it may be fetched
    credit,  // raised by the receiver: push, the slot may be written; pull, the data has been fetched
  };

  static constexpr int kSlots = 16;  // of a channel, at most

  // Collective. On the current device; every word is 0. `side`: a stream that raise_all() is tried on: the first use of
  // a copy may have the driver load code, which waits for streams that by then wait for each other.
  PeerFlags(const PeerMemory& peers, const at::Tensor& memory, int rank, int ranks, cudaStream_t side);

  // Bytes of memory that the flags of `ranks` ranks take on each.
  static int64_t bytes(int ranks);

  // Enqueues: a flag of ours at `peer` becomes 1. `captured`: whether the stream takes part in a capture.
  void raise(Channel channel, Kind kind, int slot, int peer, const CopyEngine& engine, cudaStream_t stream,
             bool captured) const;
  // Enqueues: waits until the flag that `peer` raises here is 1, and makes it 0 again.
  void await(Channel channel, Kind kind, int slot, int peer, cudaStream_t stream) const;

  // Giving up. Enqueues: every flag here becomes 1, so that one wait of each stream ends.
  void raise_all(cudaStream_t stream) const;
  // Whether all flags are 0 now.
  bool at_rest() const;

  PeerRegion& region() { return region_; }

 private:
  static int64_t count(int ranks);
  int64_t flag(Channel channel, Kind kind, int slot, int raiser) const;
  uint64_t* word(int rank, int64_t index) const { return reinterpret_cast<uint64_t*>(region_.bases[rank]) + index; }

  void* batch_mem_op_;  // cuStreamBatchMemOp
  int rank_;
  int ranks_;
  int64_t flags_;  // how many there are; as many words follow that are 1
  PeerRegion region_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
