// How messages between ranks of one host get from the memory of the sender into that of the receiver.
#include <algorithm>
#include <cstring>

#include "transport/shm/host_transport.h"

namespace rtp {
namespace {

constexpr size_t kMappingsPerPeer = 40;  // mapped slots per peer and channel, as many as may be ahead and more

}  // namespace

// The sender thread of one channel: delivers in the order of posting.
void HostTransport::serve(Channel channel) {
  auto& queue = queue_[static_cast<size_t>(channel)];
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_[static_cast<size_t>(channel)].wait(lock, [&] { return stopping_ || !queue.empty(); });
      if (stopping_) return;
      job = std::move(queue.front());
      queue.pop_front();
    }
    try {
      deliver(job);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      control().state = PeerState::failed;
      for (int peer = 0; peer < ranks_; ++peer) control(peer).ring_all();
      return;
    }
    ++completed_[static_cast<size_t>(channel)];
    control().of_callers().ring();
  }
}

void HostTransport::deliver(const Job& job) {
  const Hop& hop = job.hop;
  Mailbox& outbox = this->outbox(hop.channel, hop.to);
  const size_t bell = static_cast<size_t>(hop.channel);
  if (small(hop.send)) {
    const SmallMessage& message = outbox.small[job.sequence % kDepth];
    wait_until(hop, hop.to, bell, [&] { return message.empty(); });
    return deliver_small(hop, job.sequence);
  }
  wait_until(hop, hop.to, bell,
             [&] { return static_cast<int32_t>(outbox.posted.load(std::memory_order_acquire) - job.sequence) >= 0; });
  // Copied before it is checked, because the peer can overwrite it at any time.
  const Landing landing = outbox.landing[job.sequence % kDepth];
  landing.token.expect(hop, first_ + hop.to, "expects");
  if (landing.parts != hop.send.size()) {
    throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ", landing.parts,
                               " tensors, got ", hop.send.size()));
  }
  for (size_t index = 0; index < hop.send.size(); ++index) {
    if (landing.bytes[index] != hop.send[index].bytes) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ",
                                 landing.bytes[index], " bytes, got ", hop.send[index].bytes));
    }
  }
  const SharedMemory& target = map_landing(hop, landing);
  for (size_t index = 0; index < hop.send.size(); ++index) {
    const uint64_t offset = landing.offset[index], bytes = hop.send[index].bytes;
    if (bytes > target.bytes() || offset > target.bytes() - bytes) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring expects ", bytes,
                                 " bytes at offset ", offset, " of a segment that holds ", target.bytes(), " bytes"));
    }
  }
  for (size_t index = 0; index < hop.send.size(); ++index) {
    if (hop.send[index].bytes == 0) continue;
    std::memcpy(target.data() + landing.offset[index], hop.send[index].data, hop.send[index].bytes);
  }
  complete(hop, job.sequence);
}

// Announces a message that has been copied.
void HostTransport::complete(const Hop& hop, uint32_t sequence) {
  // Updates the local count first: once `done` is set, the peer may finish and close before this thread continues.
  ++delivered_[static_cast<size_t>(hop.channel)];
  Mailbox& outbox = this->outbox(hop.channel, hop.to);
  outbox.arrived[sequence % kDepth].store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  outbox.done.store(sequence, std::memory_order_release);
  control(hop.to).of_callers().ring();
}

// Copies a message into the empty entry of its sequence number.
void HostTransport::deliver_small(const Hop& hop, uint32_t sequence) {
  SmallMessage& message = outbox(hop.channel, hop.to).small[sequence % kDepth];
  message.token = HopToken::of(hop);
  message.parts = static_cast<uint32_t>(hop.send.size());
  std::byte* to = message.data.data();
  for (size_t index = 0; index < hop.send.size(); ++index) {
    const Span& part = hop.send[index];
    message.bytes[index] = part.bytes;
    if (part.bytes > 0) std::memcpy(to, part.data, part.bytes);
    to += part.bytes;
  }
  message.filled.store(sequence, std::memory_order_relaxed);  // `done` publishes it
  complete(hop, sequence);
}

// Copies a message that has come to its target if it is small; others are there already. Throws RotationError if the
// sender sent another one.
void HostTransport::take(const Hop& hop, uint32_t sequence) {
  SmallMessage& message = inbox(hop.channel, hop.from).small[sequence % kDepth];
  const auto expect = [&](bool equal, const auto&... what) {
    if (!equal) throw RotationError(concat(hop.describe(), ": ", what...));
  };
  const bool came = message.filled.load(std::memory_order_relaxed) == sequence;
  if (came) message.token.expect(hop, first_ + hop.from, "sent");
  expect(came || !small(hop.receive), "rank ", first_ + hop.from, " of the ring sent a message of another size");
  if (!came) return;
  const uint32_t parts = message.parts;
  expect(parts == hop.receive.size(), "rank ", first_ + hop.from, " of the ring sent ", parts, " tensors, expected ",
         hop.receive.size());
  const std::byte* from = message.data.data();
  for (size_t index = 0; index < parts; ++index) {
    const Span& part = hop.receive[index];
    const uint64_t bytes = message.bytes[index];
    expect(bytes == part.bytes, "rank ", first_ + hop.from, " of the ring sent ", bytes, " bytes, expected ",
           part.bytes);
    if (bytes > 0) std::memcpy(part.data, from, bytes);
    from += bytes;
  }
  message.emptied.store(sequence, std::memory_order_release);
  control(hop.from).of_sender(hop.channel).ring();
}

// Returns the mapped segment of the receiver that a hop targets.
const SharedMemory& HostTransport::map_landing(const Hop& hop, const Landing& landing) {
  Peer& peer = peers_[hop.to];
  auto& mapped = peer.mapped[static_cast<size_t>(hop.channel)];
  const auto known =
      std::find_if(mapped.begin(), mapped.end(), [&](const Segment& s) { return s.id == landing.segment; });
  if (known != mapped.end()) {
    mapped.splice(mapped.begin(), mapped, known);
  } else {
    try {
      mapped.push_front({landing.segment, SharedMemory(peer.pid, landing.fd, landing.segment_bytes)});
    } catch (const MemoryError& error) {
      throw RotationError(concat(hop.describe(), ": rank ", first_ + hop.to, " of the ring: ", error.what()));
    }
    if (mapped.size() > kMappingsPerPeer) mapped.pop_back();
  }
  return mapped.front().memory;
}

}  // namespace rtp
