#include "engine/hops.h"

namespace rtp {

std::shared_ptr<Transfer> Hops::post(const Hop& hop, Usage& source, Usage& target, const EventHandle& traced) {
  Transport& transport = *transport_;
  const Channel channel = hop.channel;
  const auto after_hop = [&](const auto& earlier, End end) {
    if (end == End::received) {
      transport.order_channel_after_received(channel, *earlier);
    } else {
      transport.order_channel_after_sent(channel, *earlier);
    }
  };
  const auto after_compute = [&](const Mark& mark) { transport.lanes().order_channel_after(channel, mark); };
  source.before_read(after_hop, after_compute);
  target.before_write(after_hop, after_compute);
  trace_.depart(traced);
  if (delay_.count() > 0) {
    transport.lanes().delay(channel, std::chrono::microseconds(random_() % static_cast<uint64_t>(delay_.count() + 1)));
  }
  const std::shared_ptr<Transfer> transfer = trace_.follow(traced, transport.post(hop));
  source.enter_departure(transfer);
  target.enter_arrival(transfer);
  const size_t kind = static_cast<size_t>(channel);
  ++counts_[kind];
  for (const Span& span : hop.send) bytes_[kind] += static_cast<int64_t>(span.bytes);
  return transfer;
}

}  // namespace rtp
