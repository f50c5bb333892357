// The hazard rule: the uses of a memory region since it was last overwritten, and the uses that the next reader or
// writer waits for. The executor applies it to hops and events, hazards() to the steps of a schedule.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace rtp {

// The end of a step that another step waits for: a hop is sent and received; a compute, copy or add is done.
enum class End : uint8_t { received, sent, done };

// `Hop` and `Compute` are handles; an empty handle converts to false.
template <typename Hop, typename Compute>
struct Uses {
  Hop arrived{};              // the hop that wrote it, if a hop did
  Compute written{};          // the compute that wrote it, if a compute did
  std::vector<Hop> sending;   // hops that send from it
  std::vector<Compute> read;  // computes that read it

  // Calls on_hop(hop, end) and on_compute(compute) for everything that a reader waits for: the last write.
  template <typename OnHop, typename OnCompute>
  void before_read(OnHop&& on_hop, OnCompute&& on_compute) const {
    if (arrived) on_hop(arrived, End::received);
    if (written) on_compute(written);
  }
  // The same for a writer: the last write and all later uses.
  template <typename OnHop, typename OnCompute>
  void before_write(OnHop&& on_hop, OnCompute&& on_compute) const {
    before_read(on_hop, on_compute);
    for (const Hop& hop : sending) on_hop(hop, End::sent);
    for (const Compute& compute : read) on_compute(compute);
  }

  void record_send(Hop hop) { sending.push_back(std::move(hop)); }
  void record_read(Compute compute) { read.push_back(std::move(compute)); }
  void record_receive(Hop hop) {
    *this = Uses{};
    arrived = std::move(hop);
  }
  void record_write(Compute compute) {
    *this = Uses{};
    written = std::move(compute);
  }
};

}  // namespace rtp
