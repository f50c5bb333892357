#include "engine/hops.h"

namespace rtp {

std::shared_ptr<Transfer> Hops::post(const Hop& hop, Usage& source, Usage& target, const EventHandle& traced) {
  Transport& transport = *transport_;
  const Channel channel = hop.channel;
  if (source.arrived) transport.order_channel_after_received(channel, *source.arrived);
  transport.order_channel_after(channel, source.written);
  if (target.arrived) transport.order_channel_after_received(channel, *target.arrived);
  transport.order_channel_after(channel, target.written);
  for (const Mark& read : target.read) transport.order_channel_after(channel, read);
  for (const auto& departing : target.departing) transport.order_channel_after_sent(channel, *departing);
  trace_.depart(traced);
  if (delay_.count() > 0) {
    transport.delay(channel, std::chrono::microseconds(random_() % static_cast<uint64_t>(delay_.count() + 1)));
  }
  const std::shared_ptr<Transfer> transfer = trace_.follow(traced, transport.post(hop));
  source.departing.push_back(transfer);
  target = Usage{};
  target.arrived = transfer;
  const size_t kind = static_cast<size_t>(channel);
  ++counts_[kind];
  for (const Span& span : hop.send) bytes_[kind] += static_cast<int64_t>(span.bytes);
  return transfer;
}

}  // namespace rtp
