#include "transport/ce/ce.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "device/nccl/symmetric_memory.h"
#include "transport/ce/peer_flags.h"

namespace rtp {
namespace {

using Kind = PeerFlags::Kind;

// Returns a function that calls `action` once and then returns the same event; copies share it.
std::function<StreamEvent()> once(std::function<StreamEvent()> action) {
  struct State {
    std::function<StreamEvent()> action;
    StreamEvent event;
  };
  return [state = std::make_shared<State>(State{std::move(action), nullptr})] {
    if (state->action) state->event = std::exchange(state->action, nullptr)();
    return state->event;
  };
}

bool any_bytes(const std::vector<Span>& spans) {
  return std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.bytes > 0; });
}

// Protocol of a hop. Each channel has two streams. The first flag of a conversation is raised on the stream of signals
// as soon as the memory is ready, independent of earlier hops that are still under way; everything else runs on the
// stream of the channel, on both ends in the order of the hops.
//
//   Push:  receiver                             sender
//          raise credit (signals)        ->     await credit
//          await data                    <-     copy into the receiver's slot, raise data at the receiver
//   Pull:  await data                    <-     raise data (signals)
//          copy from the sender's slot
//          raise credit at the sender    ->     await credit, later: when something waits for the end of sending
//
// A local shard is not overwritten within a pass, so a sender that is pulled from does not wait for its readers hop by
// hop: the executor waits for all ends when a slot is used again and at the end of a pass.
//
// A flag is 0 or 1, so raising it twice before it is awaited would lose a signal. The protocol excludes that: the two
// flags of a conversation (channel, slot, sender, receiver) alternate. A rank raises its flag again only after it has
// awaited the other flag, and the peer raised that flag only after it had awaited, and so reset, the first. Push: the
// slot that a credit is for has been awaited by its earlier hop (order_end_after). Pull: an unawaited credit of the same
// conversation is awaited first. Between passes every flag is 0, so that a captured pass can be replayed, and captured
// and other passes mixed. The ranks cannot deadlock: the first flag of a hop depends only on the memory of its slot.
class CopyEngineTransport : public CeTransport {
 public:
  CopyEngineTransport(const RingEnd& end, const std::string& id)
      : CeTransport(end, {id}, CommunicatorOptions{}), peers_(communicators_, end.rank, end.ranks) {
    const DeviceScope scope(device_);
    side_ = Stream::highest_priority();
    for (Stream& stream : signals_) stream = Stream::highest_priority();
    raised_.emplace();
    const at::Tensor memory = allocate_symmetric(PeerFlags::bytes(end.ranks), device_);
    try {
      flags_ = std::make_unique<PeerFlags>(peers_, memory, end.rank, end.ranks, side_.get());
      run_trial_hops();
      start();
    } catch (...) {
      const auto idle = [&](Channel channel) {
        return has_ended([&] { return cudaStreamQuery(streams_.channel(channel)); }) &&
               has_ended([&] { return cudaStreamQuery(signals(channel)); });
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
      for (const Stream& stream : signals_) cudaStreamSynchronize(stream.get());
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

  void order_channel_after(Channel channel, const StreamEvent& compute) override {
    streams_.order_channel_after(channel, compute);
    streams_.order(signals(channel), compute);
  }
  void order_end_after(const Hop& hop, End end, const StreamEvent& compute) override {
    streams_.order(signals_first(hop, end) ? signals(hop.channel) : streams_.channel(hop.channel), compute);
  }
  void order_end_after(const Hop& hop, End end, Transfer& earlier, End earlier_end) override {
    const StreamEvent over = earlier.event(earlier_end);  // enqueues an unawaited credit on the stream of the channel
    if (signals_first(hop, end)) streams_.order(signals(hop.channel), over);
  }

  bool at_rest() const override {
    const DeviceScope scope(device_);
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      RTP_CUDA_CHECK(cudaStreamSynchronize(streams_.channel(channel)));
      RTP_CUDA_CHECK(cudaStreamSynchronize(signals(channel)));
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
    // Freeing memory is not ordered after streams. The compute stream follows all hops of the slot, peers' copies too.
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
    // A slot has the same number on every rank, so the number of the receiving slot here is that of the peer's, too.
    const int number = slot(hop.channel, hop.receive_slot).number;
    const bool captured = streams_.capture() != 0;
    const auto raise_on = [&](cudaStream_t raising, Kind kind, int peer) {
      flags_->raise(hop.channel, kind, number, peer, engine_, raising, captured);
    };
    const auto raise = [&](Kind kind, int peer) { raise_on(stream, kind, peer); };
    const auto signal = [&](Kind kind, int peer) {
      raise_on(signals(hop.channel), kind, peer);
      // a capture has to join all its streams
      if (captured) streams_.order(stream, streams_.event(signals(hop.channel)));
    };
    const auto await = [&](Kind kind, int peer) { await_flag(hop, kind, number, peer, stream); };
    if (pushes(hop.channel)) {
      if (receives) signal(Kind::credit, hop.from);
      if (sends) {
        await(Kind::credit, hop.to);
        push(hop, stream, captured);
        raise(Kind::data, hop.to);
        ends.sent = supervise(hop, hop.to, stream);
      }
      if (receives) await(Kind::data, hop.from);
    } else {
      if (sends) {
        auto& unawaited = unawaited_[{hop.channel, number, hop.to}];
        if (unawaited) streams_.order(signals(hop.channel), unawaited());
        signal(Kind::data, hop.to);
        unawaited = once([this, hop = hop.without_spans(), number, stream] {
          await_flag(hop, Kind::credit, number, hop.to, stream);
          return supervise(hop, hop.to, stream);
        });
        ends.finish_sending = unawaited;
      }
      if (receives) {
        await(Kind::data, hop.from);
        pull(hop, stream, captured);
        raise(Kind::credit, hop.from);
        ends.received = supervise(hop, hop.from, stream);  // the peer that reads from this rank may be late
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

  bool pushes(Channel channel) const { return modes_[static_cast<size_t>(channel)] == CeMode::push; }
  cudaStream_t signals(Channel channel) const { return signals_[static_cast<size_t>(channel)].get(); }
  // Returns whether the first flag of a hop stands for the memory at this end.
  bool signals_first(const Hop& hop, End end) const { return (end == End::received) == pushes(hop.channel); }

  const Slot& slot(Channel channel, std::byte* base) const {
    const auto& slots = slots_[static_cast<size_t>(channel)];
    const auto found = slots.find(base);
    RTP_ASSERT(found != slots.end(), "a ", rtp::name(channel), " hop outside the slots");
    return found->second;
  }

  void await_flag(const Hop& hop, Kind kind, int number, int peer, cudaStream_t stream) const {
    flags_->await(hop.channel, kind, number, peer, stream);
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
  std::array<Stream, 2> signals_;  // by channel: first flags of hops; never contains a wait for a peer
  Stream side_;                  // used by the watchdog; never contains a wait for a peer
  std::optional<Event> raised_;  // recorded on side_ after the last write of all flags
  PeerMemory peers_;
  std::unique_ptr<PeerFlags> flags_;
  std::array<std::map<std::byte*, Slot>, 2> slots_;  // by start address
  // The newest credit of each conversation, by channel, slot and receiver: awaits it at the first call.
  std::map<std::tuple<Channel, int, int>, std::function<StreamEvent()>> unawaited_;
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
