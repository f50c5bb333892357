// Shared-memory structures between ranks of a host: the target of each message, its delivery time, and small messages.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device/streams.h"
#include "schedule/footprint.h"
#include "transport/peer_state.h"
#include "transport/shm/shared_memory.h"
#include "transport/transport.h"

namespace rtp {

using Clock = HostClock;

inline constexpr size_t kMaxTensors = 12;
inline constexpr uint32_t kDepth = kMailboxDepth;  // maximum receives posted to one peer and channel at a time

// The target of a message: offsets into a segment of the receiver.
struct Landing {
  int32_t fd;
  uint32_t parts;
  uint64_t segment;
  uint64_t segment_bytes;
  HopToken token;
  std::array<uint64_t, kMaxTensors> offset;
  std::array<uint64_t, kMaxTensors> bytes;
};

// A small message, which waits here until the receiver copies it to its target, so that neither rank waits for the
// other to post. The sender writes it and sets `filled` to its sequence number; the receiver then sets `emptied`.
struct SmallMessage {
  std::atomic<uint32_t> filled;
  std::atomic<uint32_t> emptied;
  uint32_t parts;
  HopToken token;
  std::array<uint64_t, kMaxTensors> bytes;
  std::array<std::byte, kMostSmall> data;

  bool empty() const { return filled.load(std::memory_order_relaxed) == emptied.load(std::memory_order_acquire); }
};

// The receives of this rank from one peer on one channel. The owner increments `posted`; the peer increments `done` and
// sets `arrived`: all processes of a host share steady_clock. Memory of `small` that no message uses is not allocated.
struct Mailbox {
  std::atomic<uint32_t> posted;
  std::atomic<uint32_t> done;
  std::array<SmallMessage, kDepth> small;
  std::array<Landing, kDepth> landing;
  std::array<std::atomic<Clock::rep>, kDepth> arrived;
};

struct Control {
  uint64_t number;
  std::atomic<PeerState> state;
  // Rung after every change that the sender of a channel or (last bell) a caller of this rank may wait for.
  std::array<Bell, 3> bells;

  // followed by 2 * ranks mailboxes
  Mailbox& mailbox(Channel channel, int peer, int ranks) {
    auto* first = reinterpret_cast<Mailbox*>(this + 1);
    return first[static_cast<int>(channel) * ranks + peer];
  }
  Bell& of_sender(Channel channel) { return bells[static_cast<size_t>(channel)]; }
  Bell& of_callers() { return bells.back(); }
  void ring_all() {
    for (Bell& bell : bells) bell.ring();
  }
  static size_t bytes(int ranks) { return sizeof(Control) + 2 * static_cast<size_t>(ranks) * sizeof(Mailbox); }
};

}  // namespace rtp
