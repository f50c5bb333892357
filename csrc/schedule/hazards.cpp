#include "schedule/hazards.h"

#include <array>
#include <map>
#include <tuple>

namespace rtp {
namespace {

struct Position {
  int step = -1;
  explicit operator bool() const { return step >= 0; }
};

using Key = std::tuple<Channel, int, int, Half>;

Key key_of(const Access& access) { return {access.buffer.channel, access.buffer.slot, access.place, access.half}; }

}  // namespace

std::vector<std::vector<Wait>> hazards(const std::vector<Step>& steps, int ranks) {
  std::map<Key, Uses<Position, Position>> uses;
  std::vector<std::vector<Wait>> waits;
  for (int step = 0; step < static_cast<int>(steps.size()); ++step) {
    const bool is_hop = steps[step].travels();
    const auto read = reads(steps[step], ranks);
    const auto written = writes(steps[step], ranks);
    std::vector<Wait>& needed = waits.emplace_back();
    const auto on_hop = [&](Position hop, End end) { needed.push_back({hop.step, end}); };
    const auto on_compute = [&](Position compute) { needed.push_back({compute.step, End::done}); };
    for (const Access& access : read) uses[key_of(access)].before_read(on_hop, on_compute);
    for (const Access& access : written) uses[key_of(access)].before_write(on_hop, on_compute);
    for (const Access& access : read) {
      auto& use = uses[key_of(access)];
      is_hop ? use.record_send({step}) : use.record_read({step});
    }
    for (const Access& access : written) {
      auto& use = uses[key_of(access)];
      is_hop ? use.record_receive({step}) : use.record_write({step});
    }
  }
  return waits;
}

const char* name(End end) {
  constexpr std::array names{"received", "sent", "done"};
  return names[static_cast<size_t>(end)];
}

}  // namespace rtp
