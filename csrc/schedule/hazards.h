// Dependencies between the steps of a schedule.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "schedule/uses.h"

namespace rtp {

// One end of an earlier step, identified by its position.
struct Wait {
  int step;
  End end;
};

// Returns the waits of every step of a schedule in a ring of `ranks`.
std::vector<std::vector<Wait>> hazards(const std::vector<Step>& steps, int ranks);

const char* name(End end);

}  // namespace rtp
