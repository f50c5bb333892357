#include "transport/ce/ce.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "device/nccl/symmetric_memory.h"
#include "transport/ce/peer_flags.h"

namespace rtp {
namespace {

using Kind = PeerFlags::Kind;

bool any_bytes(const std::vector<Span>& spans) {
  return std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.bytes > 0; });
}

// Protocol of a hop. All operations are enqueued on the stream of the channel, on both ends in the order of the hops.
//
//   Push:  receiver                             sender
//          raise credit at the sender    ->     await credit
//          await data                    <-     copy into the receiver's slot, raise data at the receiver
//   Pull:  await data                    <-     raise data at the receiver
//          copy from the sender's slot
//          raise credit at the sender    ->     await credit
//
// A flag is 0 or 1, so raising it twice before it is awaited would lose a signal. The protocol excludes that: the two
// flags of a conversation (channel, slot, sender, receiver) alternate. A rank raises its flag again only after it has
// awaited the other flag in the same stream, and the peer raised that flag only after it had awaited, and so reset, the
// first. Between passes every flag is 0, so that a captured pass can be replayed, and captured and other passes mixed.
// The ranks cannot deadlock: the first flag that a hop raises depends only on the previous hop.
class CopyEngineTransport : public CeTransport {
 public:
  CopyEngineTransport(const RingEnd& end, const std::string& id)
      : CeTransport(end, {id}, CommunicatorOptions{}), peers_(communicators_, end.rank, end.ranks) {
    const DeviceScope scope(device_);
    side_ = Stream::highest_priority();
    raised_.emplace();
    const at::Tensor memory = allocate_symmetric(PeerFlags::bytes(end.ranks), device_);
    try {
      flags_ = std::make_unique<PeerFlags>(peers_, memory, end.rank, end.ranks, side_.get());
      run_trial_hops();
      start();
    } catch (...) {
      const auto idle = [&](Channel channel) {
        return has_ended([&] { return cudaStreamQuery(streams_.channel(channel)); });
      };
      idle(Channel::weight) && idle(Channel::gradient) ? communicators_.abort() : leak();
      throw;
    }
  }

  ~CopyEngineTransport() override {
    const DeviceScope scope(device_);
    const bool over = all_hops_ended();  // before the watchdog stops, because it ends waits
    stop();
    if (over) {
      cudaStreamSynchronize(side_.get());  // the final write of all flags
      communicators_.abort();              // deregisters the windows before their memory is freed
    } else {
      leak();
    }
  }

  const char* name() const override { return "ce"; }
  bool sends_anywhere() const override { return false; }
  bool receives_anywhere() const override { return false; }
  // Flags are set and reset identically for eager and captured hops, and the ranks share no other state.
  bool takes_graphs() const override { return true; }
  void set_mode(Channel channel, CeMode mode) override { modes_[static_cast<size_t>(channel)] = mode; }

  bool at_rest() const override {
    const DeviceScope scope(device_);
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      RTP_CUDA_CHECK(cudaStreamSynchronize(streams_.channel(channel)));
    }
    return flags_->at_rest();
  }

  at::Tensor allocate(Channel channel, int64_t bytes) override {
    const DeviceScope scope(device_);
    check();
    refuse_capture();
    auto& slots = slots_[static_cast<size_t>(channel)];
    int number = 0;  // lowest free number, which is the same on every rank
    while (std::any_of(slots.begin(), slots.end(), [&](const auto& slot) { return slot.second.number == number; })) {
      ++number;
    }
    RTP_ASSERT(number < PeerFlags::kSlots, "more slots than flags");
    try {
      const at::Tensor memory = allocate_symmetric(std::max<int64_t>(bytes, 1), device_);
      slots[static_cast<std::byte*>(memory.data_ptr())] = {number, peers_.share(memory)};
      return memory;
    } catch (const RotationError& error) {  // the ranks no longer have the same slots
      abort(error.what());
      check();  // the watchdog's reason is more specific
      throw;
    }
  }

  void release(Channel channel, const at::Tensor& slot) override {
    const DeviceScope scope(device_);
    auto& slots = slots_[static_cast<size_t>(channel)];
    const auto found = slots.find(static_cast<std::byte*>(slot.data_ptr()));
    if (found == slots.end()) return;
    refuse_capture();
    RTP_CUDA_CHECK(cudaDeviceSynchronize());  // freeing memory is not ordered after streams
    peers_.withdraw(found->second.region);
    slots.erase(found);
  }

 protected:
  Ends enqueue(const Hop& hop, cudaStream_t stream) override {
    const bool sends = any_bytes(hop.send);
    const bool receives = any_bytes(hop.receive);
    Ends ends;
    if (!sends && !receives) return ends;
    // A slot has the same number on every rank, so the number of the receiving slot here is that of the peer's, too.
    const int number = slot(hop.channel, hop.receive_slot).number;
    const bool captured = streams_.capture() != 0;
    const auto raise = [&](Kind kind, int peer) {
      flags_->raise(hop.channel, kind, number, peer, engine_, stream, captured);
    };
    const auto await = [&](Kind kind, int peer) { flags_->await(hop.channel, kind, number, peer, stream); };
    if (modes_[static_cast<size_t>(hop.channel)] == CeMode::push) {
      if (receives) raise(Kind::credit, hop.from);
      if (sends) {
        await(Kind::credit, hop.to);
        push(hop, stream, captured);
        raise(Kind::data, hop.to);
        ends.sent = supervise(hop, hop.to, stream);
      }
      if (receives) await(Kind::data, hop.from);
    } else {
      if (sends) raise(Kind::data, hop.to);
      if (receives) {
        await(Kind::data, hop.from);
        pull(hop, stream, captured);
        raise(Kind::credit, hop.from);
        ends.received = supervise(hop, hop.from, stream);  // the peer that reads from this rank may be late
      }
      if (sends) {
        await(Kind::credit, hop.to);
        ends.sent = supervise(hop, hop.to, stream);
      }
    }
    return ends;
  }

  // Keeps the communicator and the memory: enqueued copies need the addresses.
  bool give_up() noexcept override {
    communicators_.give_up_waiting();
    try {
      if (raised_->reached()) {
        flags_->raise_all(side_.get());
        raised_->record(side_.get(), 0);
      }
      return true;  // each call ends one wait per stream
    } catch (...) {
      return false;
    }
  }

  void deregister_all() override {
    for (auto& slots : slots_) {
      for (auto& [base, slot] : slots) peers_.withdraw(slot.region);
      slots.clear();
    }
    RTP_CUDA_CHECK(cudaStreamSynchronize(side_.get()));
    peers_.withdraw(flags_->region());
  }

 private:
  struct Slot {
    int number;
    PeerRegion region;
  };

  const Slot& slot(Channel channel, std::byte* base) const {
    const auto& slots = slots_[static_cast<size_t>(channel)];
    const auto found = slots.find(base);
    RTP_ASSERT(found != slots.end(), "a ", rtp::name(channel), " hop outside the slots");
    return found->second;
  }

  // Memory that the GPU may still access is never unmapped: that would fail the whole process.
  void leak() noexcept {
    communicators_.leak();
    static_cast<void>(flags_.release());
    static_cast<void>(new decltype(slots_)(std::move(slots_)));
  }

  void push(const Hop& hop, cudaStream_t stream, bool captured) const {
    std::byte* landing = slot(hop.channel, hop.receive_slot).region.bases[hop.to];
    std::vector<Copy> copies;
    for (const Block& block : blocks_of(hop.send, hop.remote_receive_offsets, hop.in_whole_slot)) {
      copies.push_back({landing + block.there, block.data, block.bytes});
    }
    engine_.copy(copies, stream, captured);
  }

  void pull(const Hop& hop, cudaStream_t stream, bool captured) const {
    const std::byte* source = slot(hop.channel, hop.send_slot).region.bases[hop.from];
    std::vector<Copy> copies;
    for (const Block& block : blocks_of(hop.receive, hop.remote_send_offsets, hop.in_whole_slot)) {
      copies.push_back({block.data, source + block.there, block.bytes});
    }
    engine_.copy(copies, stream, captured);
  }

  std::array<CeMode, 2> modes_{CeMode::push, CeMode::push};
  CopyEngine engine_;
  Stream side_;                  // used by the watchdog; never contains a wait for a peer
  std::optional<Event> raised_;  // recorded on side_ after the last write of all flags
  PeerMemory peers_;
  std::unique_ptr<PeerFlags> flags_;
  std::array<std::map<std::byte*, Slot>, 2> slots_;  // by start address
};

}  // namespace

std::optional<std::string> ce_refusal() {
  if (auto reason = peer_memory_refusal()) return reason;
  return stream_wait_refusal();
}

std::shared_ptr<CeTransport> make_ce_transport(const RingEnd& end, const std::string& id) {
  return make_owned<CopyEngineTransport>(end, id);
}

}  // namespace rtp
