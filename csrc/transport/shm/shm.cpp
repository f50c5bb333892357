#include "transport/shm/shm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "transport/shm/host_transport.h"

namespace rtp {

class HostTransfer : public Transfer {
 public:
  HostTransfer(std::shared_ptr<HostTransport> transport, const Hop& hop)
      : transport_(std::move(transport)), hop_(hop) {}
  HostTransfer(const HostTransfer&) = delete;
  HostTransfer& operator=(const HostTransfer&) = delete;
  ~HostTransfer() override {
    if (receive_) entry() = nullptr;
  }

  void expect(uint32_t sequence) {
    receive_ = sequence;
    entry() = this;
  }
  void expect_nothing() { arrived_ = Clock::now().time_since_epoch().count(); }
  void sends(uint64_t job) { send_ = job; }

  void wait_received() override {
    if (!receive_) return;
    const Mailbox& inbox = transport_->inbox(hop_.channel, hop_.from);
    transport_->wait_until(hop_, hop_.from, kCallers, [&] {
      return static_cast<int32_t>(inbox.done.load(std::memory_order_acquire) - *receive_) >= 0;
    });
    take();
  }

  // Takes the message, which has arrived, from its entry of the mailbox.
  void take() {
    const Mailbox& inbox = transport_->inbox(hop_.channel, hop_.from);
    arrived_ = inbox.arrived[*receive_ % kDepth].load(std::memory_order_relaxed);
    transport_->take(hop_, *receive_);
    entry() = nullptr;
    receive_.reset();
  }

  Moment arrived() const override {
    return arrived_ ? host_moment(Clock::time_point(Clock::duration(*arrived_))) : nullptr;
  }

  void wait_sent() override {
    if (!send_) return;
    const auto& delivered = transport_->delivered_[static_cast<size_t>(hop_.channel)];
    transport_->wait_until(hop_, hop_.to, kCallers,
                           [&] { return delivered.load(std::memory_order_acquire) >= *send_; });
    send_.reset();
  }

 private:
  HostTransfer*& entry() {
    return transport_->receives_[transport_->mailbox_index(hop_.channel, hop_.from)][*receive_ % kDepth];
  }

  std::shared_ptr<HostTransport> transport_;
  Hop hop_;
  std::optional<uint32_t> receive_;
  std::optional<uint64_t> send_;
  std::optional<Clock::rep> arrived_;
};

std::unique_ptr<Transfer> HostTransport::post(const Hop& hop) {
  const size_t channel = static_cast<size_t>(hop.channel);
  RTP_ASSERT(hop.receive.size() <= kMaxTensors && hop.send.size() <= kMaxTensors, hop.describe(),
             " has too many parts");
  auto transfer = std::make_unique<HostTransfer>(shared_from_this(), hop);
  if (const size_t bytes = total(hop.receive); bytes > 0) {
    Mailbox& inbox = this->inbox(hop.channel, hop.from);
    const uint32_t sequence = ++received_[mailbox_index(hop.channel, hop.from)];
    // A late gradient, or a shard that is ahead, is waited for after later hops, whose sender needs its entry.
    HostTransfer* earlier = receives_[mailbox_index(hop.channel, hop.from)][sequence % kDepth];
    if (earlier != nullptr) earlier->wait_received();
    // A small message may have come already.
    const auto missing = static_cast<int32_t>(sequence - inbox.done.load());
    RTP_ASSERT(missing <= static_cast<int32_t>(kDepth), hop.describe(), " outruns its mailbox");
    Landing& landing = inbox.landing[sequence % kDepth];
    const auto filled =
        std::find_if(hop.receive.begin(), hop.receive.end(), [](const Span& part) { return part.bytes > 0; });
    const auto segment = find_segment(filled->data);
    RTP_ASSERT(segment != nullptr, hop.describe(), " must land in a slot");
    landing.fd = segment->memory.fd();
    landing.segment = segment->id;
    landing.token = HopToken::of(hop);
    landing.segment_bytes = segment->memory.bytes();
    landing.parts = static_cast<uint32_t>(hop.receive.size());
    for (size_t index = 0; index < hop.receive.size(); ++index) {
      const Span& span = hop.receive[index];
      landing.offset[index] = span.bytes == 0 ? 0 : static_cast<uint64_t>(span.data - segment->memory.data());
      landing.bytes[index] = span.bytes;
    }
    inbox.posted.store(sequence, std::memory_order_release);
    control(hop.from).of_sender(hop.channel).ring();
    transfer->expect(sequence);
  } else {
    transfer->expect_nothing();
  }
  if (total(hop.send) > 0) {
    if (control().state != PeerState::present) throw_end(hop);
    const uint32_t sequence = ++sent_[mailbox_index(hop.channel, hop.to)];
    // The sender thread still announces a message that it has delivered: `done` must not go back.
    const bool idle = completed_[channel].load(std::memory_order_acquire) == queued_[channel];
    if (idle && small(hop.send) && outbox(hop.channel, hop.to).small[sequence % kDepth].empty()) {
      ++queued_[channel], ++completed_[channel];
      deliver_small(hop, sequence);
      return transfer;
    }
    {
      const std::lock_guard lock(mutex_);
      queue_[channel].push_back({hop, sequence});
      transfer->sends(++queued_[channel]);
    }
    wake_[channel].notify_one();
  }
  return transfer;
}

at::Tensor HostTransport::allocate(Channel, int64_t bytes) {
  const auto segment = std::make_shared<Segment>(
      Segment{next_segment_++, SharedMemory(std::max<size_t>(static_cast<size_t>(bytes), 1))});
  std::byte* data = segment->memory.data();
  {
    const std::lock_guard lock(segments_mutex_);
    segments_[data] = segment;
  }
  const auto release = [transport = weak_from_this(), segment, data](void*) {
    if (const auto self = transport.lock()) {
      const std::lock_guard lock(self->segments_mutex_);
      self->segments_.erase(data);
    }
  };
  return at::from_blob(data, {bytes}, release, at::kByte);
}

void HostTransport::end(PeerState state, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    reason_ = reason;
  }
  PeerState before = PeerState::present;
  control().state.compare_exchange_strong(before, state);
  if (before == PeerState::awaited) control().state = state;
  for (auto& wake : wake_) wake.notify_all();
  for (size_t peer = 0; peer < peers_.size(); ++peer) control(static_cast<int>(peer)).ring_all();
  control().ring_all();
  for (std::thread& sender : senders_) {
    if (sender.joinable()) sender.join();
  }
}

std::shared_ptr<ShmTransport> make_shm_transport(int rank, int ranks, std::chrono::milliseconds timeout, int first) {
  return make_owned<HostTransport>(rank, ranks, timeout, first);
}

}  // namespace rtp
