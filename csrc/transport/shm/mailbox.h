// What ranks of a host tell each other in shared memory: where a receiver wants a message, and when it was delivered.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device/streams.h"
#include "transport/shm/shared_memory.h"

namespace rtp {

using Clock = HostClock;

inline constexpr size_t kMaxTensors = 8;
inline constexpr uint32_t kDepth = 8;  // receives that may be posted to one peer and channel at once

enum class Life : uint32_t { starting, alive, closed, failed };

// Where a receiver wants a message: offsets into one of its segments.
struct Landing {
  int32_t fd;
  uint32_t parts;
  uint64_t segment;
  uint64_t segment_bytes;
  uint64_t identity;  // of the hop, so that ranks that are out of step notice
  std::array<uint64_t, kMaxTensors> offset;
  std::array<uint64_t, kMaxTensors> bytes;
};

// Receives of this rank from one peer on one channel. `posted` is raised by the owner, `done` by the peer, which says
// when it delivered: steady_clock is one for all processes of a host.
struct Mailbox {
  std::atomic<uint32_t> posted;
  std::atomic<uint32_t> done;
  std::array<Landing, kDepth> landing;
  std::array<std::atomic<Clock::rep>, kDepth> arrived;
};

struct Control {
  uint64_t nonce;
  std::atomic<Life> life;
  // Rung by anybody who changes something that the sender of a channel or, the last one, a caller of this rank may be
  // waiting for.
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
