#include "transport/transport.h"

#include <functional>
#include <thread>

#include "base/checks.h"

namespace rtp {

std::string Hop::describe() const {
  if (count == 0) return concat(operation, ", as a graph");
  return concat(operation, ", ", rtp::name(channel), " hop ", index + 1, " of ", count);
}

uint64_t Hop::identity() const {
  return std::hash<std::string>{}(operation) * 1024 + static_cast<uint64_t>(index) * 2 + static_cast<uint64_t>(channel);
}

std::vector<Block> blocks_of(const std::vector<Span>& parts, const std::vector<size_t>& there, bool in_whole_slot) {
  const size_t padding = in_whole_slot ? 1 : 64;  // upper bound of the padding between the parts of a slot
  std::vector<Block> blocks;
  for (size_t index = 0; index < parts.size(); ++index) {
    const Span& span = parts[index];
    if (span.bytes == 0) continue;
    if (!blocks.empty()) {
      Block& last = blocks.back();
      const auto distance = static_cast<size_t>(span.data - last.data);
      const bool same_gap = span.data > last.data && there[index] > last.there && there[index] - last.there == distance;
      if (same_gap && distance >= last.bytes && distance - last.bytes < padding) {
        last.bytes = distance + span.bytes;
        continue;
      }
    }
    blocks.push_back({span.data, span.bytes, there[index]});
  }
  return blocks;
}

void Transport::delay(const Hop&, std::chrono::microseconds time) { std::this_thread::sleep_for(time); }

void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited, const std::string& cause) {
  throw RingTimeout(
      concat(hop.describe(), ": rank ", peer, " of the ring did not answer (waited ", waited.count(), " s): ", cause));
}

}  // namespace rtp
