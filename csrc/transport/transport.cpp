#include "transport/transport.h"

#include <cstring>
#include <functional>
#include <thread>

#include "base/checks.h"

namespace rtp {

std::string Hop::describe() const {
  if (count == kCollective) return operation;
  if (count == 0) return concat(operation, ", as a graph");
  if (is_collective(action)) return concat(operation, ", ", rtp::name(channel), ' ', rtp::name(action));
  return concat(operation, ", ", rtp::name(channel), " hop ", index + 1, " of ", count);
}

uint64_t Hop::bytes_sent() const {
  const auto sum = [](const std::vector<Span>& parts) {
    uint64_t bytes = 0;
    for (const Span& part : parts) bytes += part.bytes;
    return bytes;
  };
  if (action == Action::gather) return sum(receive) - sum(send);
  return action == Action::scatter ? sum(send) - sum(receive) : sum(send);
}

uint64_t Hop::identity() const {
  return std::hash<std::string>{}(operation) * 1024 + updates * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(index) * 2 +
         static_cast<uint64_t>(channel);
}

HopToken HopToken::of(const Hop& hop) {
  HopToken token{hop.identity(), hop.updates, hop.index, hop.count, hop.channel, {}};
  hop.operation.copy(token.operation.data(), token.operation.size() - 1);
  return token;
}

void HopToken::expect(const Hop& hop, int peer, const char* does) const {
  if (identity == hop.identity()) return;
  Hop other;
  other.channel = channel, other.index = index, other.count = count;
  other.operation.assign(operation.data(), strnlen(operation.data(), operation.size()));
  const auto after = [&](uint64_t count) {
    return updates == hop.updates ? "" : concat(" after ", count, " updates by optimizers");
  };
  throw RotationError(concat(hop.describe(), after(hop.updates), ": the ranks of the ring are out of step: rank ", peer,
                             " ", does, " ", other.describe(), after(updates)));
}

std::vector<Block> blocks_of(const std::vector<Span>& parts, const std::vector<size_t>& there, bool in_parts) {
  const size_t padding = in_parts ? 1 : 64;  // upper bound of the padding between the parts of a slot
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
  const std::string who = peer == Hop::kAllRanks ? "a rank" : concat("rank ", peer);
  throw RingTimeout(
      concat(hop.describe(), ": ", who, " of the ring did not answer (waited ", waited.count(), " s): ", cause));
}

}  // namespace rtp
