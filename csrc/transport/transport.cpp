#include "transport/transport.h"

#include <functional>

#include "base/checks.h"

namespace rtp {

std::string Hop::describe() const {
  if (count == 0) return concat(operation, ", as a graph");
  return concat(operation, ", ", rtp::name(channel), " hop ", index + 1, " of ", count);
}

uint64_t Hop::identity() const {
  return std::hash<std::string>{}(operation) * 1024 + static_cast<uint64_t>(index) * 2 + static_cast<uint64_t>(channel);
}

std::vector<Block> blocks_of(const std::vector<Span>& parts, const std::vector<size_t>& there, bool among_others) {
  const size_t padding = among_others ? 1 : 64;  // less than this lies between the parts of a slot
  std::vector<Block> blocks;
  for (size_t index = 0; index < parts.size(); ++index) {
    const Span& span = parts[index];
    if (span.bytes == 0) continue;
    if (!blocks.empty()) {
      Block& last = blocks.back();
      const auto ahead = static_cast<size_t>(span.data - last.data);
      const bool alike = span.data > last.data && there[index] > last.there && there[index] - last.there == ahead;
      if (alike && ahead >= last.bytes && ahead - last.bytes < padding) {
        last.bytes = ahead + span.bytes;
        continue;
      }
    }
    blocks.push_back({span.data, span.bytes, there[index]});
  }
  return blocks;
}

void throw_timeout(const Hop& hop, int peer, std::chrono::duration<double> waited, const std::string& cause) {
  throw RingTimeout(
      concat(hop.describe(), ": rank ", peer, " of the ring did not answer (waited ", waited.count(), " s): ", cause));
}

}  // namespace rtp
