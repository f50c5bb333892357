// The schedules of route two_level.
#pragma once

#include "schedule/builder.h"

namespace rtp {

// Appends the steps of the builder's pass, for K hosts of G ranks, both at least 2; rank r is at place r % G of host r
// / G.
//
// A pass has K phases. In phase p of a forward, host n computes with the shards owned by host n - p: its G shards
// rotate inside the host as in a ring of G, while each rank sends its shard of the phase to the same place of host n +
// 1. Backward runs in the opposite direction. The gradient of a phase starts from zero, and the sum from host n + 1 is
// added at the end of the phase, so that its hop overlaps with the whole phase. Related: MiCS, arXiv 2205.00119, and
// ZeRO++, arXiv 2306.10209, which gather within hosts and between them.
void build_two_level(Builder& builder);

}  // namespace rtp
