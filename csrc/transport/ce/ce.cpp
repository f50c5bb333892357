#include "transport/ce/ce.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include "device/nccl/symmetric_memory.h"
#include "transport/ce/peer_flags.h"

namespace rtp {
namespace {

using Kind = PeerFlags::Kind;

bool any_bytes(const std::vector<Span>& spans) {
  return std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.bytes > 0; });
}

// Protocol of a hop. One rank owns the slot that the hop accesses across ranks: the receiver in push, the sender in
// pull. The other rank, its peer, copies.
//
//   owner                                     peer
//   offers:  raise offer at the peer    ->    copies:  await offer
//                                                      copy into the slot (push) or out of it (pull)
//   returns: await done                 <-             raise done at the owner
//
// Each rank has these streams for each channel, all in the order of the hops:
//   copies   the stream of the channel
//   offers   waits for the earlier uses of the owner's slot (push: all; pull: the last write) and for no peer, so that
//   a
//            peer never waits for a copy that the owner itself awaits
//   returns  push: the stream of the channel, because the next hop usually sends the data that has arrived;
//            pull: a stream of its own, so that several peers can read one slot while this rank reads theirs
//
// A flag is 0 or 1, so raising it twice before it is awaited would lose a signal. The protocol excludes that: the two
// flags of a conversation (channel, slot, shard, owner, peer) alternate. The executor orders every use of memory after
// the uses that conflict with it. Memory is therefore offered to a peer again only after `done` of its last access was
// awaited: in push, because a receive overwrites what the last one wrote; in pull, because a pass sends the same data
// to a peer once, so that the memory was overwritten meanwhile. And the peer raised `done` only after it had awaited,
// and so reset, the offer. The end of a pass awaits both ends of its hops. So every flag is 0 between passes: a
// captured pass can be replayed, and captured and other passes mixed.
//
// The ranks cannot deadlock: everything that a hop waits for on any stream belongs to earlier hops and computes, except
// the two flags, which the peer raises in its own hop of the same number. This holds even where streams share a
// hardware queue, because the host enqueues the three parts of a hop in the order above.
class CopyEngineTransport : public CeTransport {
 public:
  CopyEngineTransport(const RingEnd& end, const std::string& id)
      : CeTransport(end, {id}, CommunicatorOptions{}), peers_(communicators_, end.rank, end.ranks) {
    const DeviceScope scope(device_);
    side_ = Stream::highest_priority();
    raised_.emplace();
    for (const Channel channel : kChannels) {
      offers_[index(channel)] = Stream::highest_priority();
      set_mode(channel, CeMode::push);
    }
    const int shards = end.shards > 0 ? end.shards : end.ranks;
    const at::Tensor memory = allocate_symmetric(PeerFlags::bytes(end.ranks, shards), device_);
    try {
      flags_ = std::make_unique<PeerFlags>(peers_, memory, end.rank, end.ranks, shards, side_.get());
      run_trial_hops();
      start();
    } catch (...) {
      own_streams_ended(std::chrono::milliseconds(0)) ? communicators_.abort() : leak();
      throw;
    }
  }

  ~CopyEngineTransport() override {
    const DeviceScope scope(device_);
    // Before the watchdog stops, because it ends waits. Its hops do not include the offers of a failed ring.
    const bool over = all_hops_ended() && own_streams_ended(kOffersEnd);
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

  void set_mode(Channel channel, CeMode mode) override {
    const DeviceScope scope(device_);
    const bool push = mode == CeMode::push;
    modes_[index(channel)] = mode;
    Stream& returns = returns_[index(channel)];
    if (!push && returns.get() == nullptr) returns = Stream::highest_priority();
    user(channel, push ? HopMemory::target : HopMemory::source) = offers_[index(channel)].get();
    user(channel, push ? HopMemory::source : HopMemory::target) = stream(channel);
  }

  bool at_rest() const override {
    const DeviceScope scope(device_);
    for (cudaStream_t stream : own_streams()) RTP_CUDA_CHECK(cudaStreamSynchronize(stream));
    return flags_->raised() == 0;
  }
  int64_t raised() const override {
    const DeviceScope scope(device_);
    return flags_->raised();
  }

  int64_t most_slots() const override { return PeerFlags::kSlots; }
  at::Tensor allocate(Channel channel, int64_t bytes) override {
    const DeviceScope scope(device_);
    check();
    refuse_capture();
    auto& slots = slots_[index(channel)];
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

  // Peers no longer access the slot: the executor has ordered the compute stream after both ends of its hops, that is
  // after `done` of every peer, which follows the peer's copy.
  void release(Channel channel, const at::Tensor& slot) override {
    const DeviceScope scope(device_);
    auto& slots = slots_[index(channel)];
    const auto found = slots.find(static_cast<std::byte*>(slot.data_ptr()));
    if (found == slots.end()) return;
    refuse_capture();
    finish_uses(channel);
    peers_.withdraw(found->second.region);
    slots.erase(found);
  }

 protected:
  Ends enqueue(const Hop& hop, cudaStream_t stream) override {
    const bool sends = any_bytes(hop.send);
    const bool receives = any_bytes(hop.receive);
    Ends ends;
    if (!sends && !receives) return ends;
    const bool push = modes_[index(hop.channel)] == CeMode::push;
    const bool owns = push ? receives : sends, copies = push ? sends : receives;
    const int peer = push ? hop.from : hop.to, owner = push ? hop.to : hop.from;
    StreamEvent& returned = push ? ends.received : ends.sent;
    StreamEvent& copied = push ? ends.sent : ends.received;
    cudaStream_t offers = offers_[index(hop.channel)].get();
    cudaStream_t returns = push ? stream : returns_[index(hop.channel)].get();
    // A slot has the same number on every rank, so the number of the slot here is that of the owner's, too.
    const int number = slot(hop.channel, push ? hop.receive_slot : hop.send_slot).number;
    const PeerFlags::Place here{hop.channel, number, push ? hop.receive_shard : hop.send_shard, hop.second_half};
    const PeerFlags::Place there{hop.channel, number, push ? hop.send_shard : hop.receive_shard, hop.second_half};
    const bool captured = streams_.capture() != 0;
    if (owns) flags_->raise(Kind::offer, here, peer, engine_, offers, captured);
    if (copies) {
      flags_->await(Kind::offer, there, owner, stream);
      push ? copy_there(hop, stream, captured) : copy_here(hop, stream, captured);
      flags_->raise(Kind::done, there, owner, engine_, stream, captured);
      copied = supervise(hop, owner, stream);
    }
    if (owns) {
      if (captured) join(returns, offers);
      flags_->await(Kind::done, here, peer, returns);
      returned = supervise(hop, peer, returns);
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
    for (const Stream& offers : offers_) RTP_CUDA_CHECK(cudaStreamSynchronize(offers.get()));
    peers_.withdraw(flags_->region());
  }

 private:
  static constexpr std::array kChannels{Channel::weight, Channel::gradient};
  static constexpr auto kOffersEnd = std::chrono::seconds(2);

  struct Slot {
    int number;
    PeerRegion region;
  };

  static size_t index(Channel channel) { return static_cast<size_t>(channel); }

  // The streams that access flags and slots, without the side stream.
  std::vector<cudaStream_t> own_streams() const {
    std::vector<cudaStream_t> streams;
    for (const Channel channel : kChannels) {
      for (cudaStream_t own : {stream(channel), offers_[index(channel)].get(), returns_[index(channel)].get()}) {
        if (own != nullptr) streams.push_back(own);
      }
    }
    return streams;
  }

  // Waits at most `longest` for the work of the own streams to end. Returns whether it has ended.
  bool own_streams_ended(std::chrono::milliseconds longest) const {
    const auto deadline = std::chrono::steady_clock::now() + longest;
    for (cudaStream_t stream : own_streams()) {
      while (!has_ended([&] { return cudaStreamQuery(stream); })) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return true;
  }

  // Orders `stream` after `other`. All streams of a capture must be joined; the flags imply this order anyway.
  void join(cudaStream_t stream, cudaStream_t other) const {
    std::static_pointer_cast<Event>(streams_.event(other))->block(stream);
  }

  const Slot& slot(Channel channel, std::byte* base) const {
    const auto& slots = slots_[index(channel)];
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

  void copy_there(const Hop& hop, cudaStream_t stream, bool captured) const {
    std::byte* landing = slot(hop.channel, hop.receive_slot).region.bases[hop.to];
    std::vector<Copy> copies;
    for (const Block& block : blocks_of(hop.send, hop.remote_receive_offsets, hop.in_parts)) {
      copies.push_back({landing + block.there, block.data, block.bytes});
    }
    engine_.copy(copies, stream, captured);
  }

  void copy_here(const Hop& hop, cudaStream_t stream, bool captured) const {
    const std::byte* source = slot(hop.channel, hop.send_slot).region.bases[hop.from];
    std::vector<Copy> copies;
    for (const Block& block : blocks_of(hop.receive, hop.remote_send_offsets, hop.in_parts)) {
      copies.push_back({block.data, source + block.there, block.bytes});
    }
    engine_.copy(copies, stream, captured);
  }

  std::array<CeMode, 2> modes_{CeMode::push, CeMode::push};
  CopyEngine engine_;
  std::array<Stream, 2> offers_;   // by channel; never contain a wait for a peer
  std::array<Stream, 2> returns_;  // by channel; null before a channel is set to pull
  Stream side_;                    // used by the watchdog; never contains a wait for a peer
  std::optional<Event> raised_;    // recorded on side_ after the last write of all flags
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
