// The schedules of route two_level.
#pragma once

#include "schedule/builder.h"

namespace rtp {

// Appends the steps of the builder's pass, for K hosts of G ranks, both at least 2, rank r at place r % G of host r /
// G.
//
// A pass has K phases. In phase p of a forward host n works on the shards whose home is host n - p: its G shards turn
// inside as in a ring of G, while each rank hands its own shard of the phase, which is at home at its own place, to the
// same place of host n + 1. Backward goes the other way. A phase's gradient starts from zero, and what has arrived from
// host n + 1 is added at the phase's end, so that its hop hides under the whole phase.
// Related: MiCS, arXiv 2205.00119, and ZeRO++, arXiv 2306.10209, which gather within hosts and between them.
void build_two_level(Builder& builder);

}  // namespace rtp
