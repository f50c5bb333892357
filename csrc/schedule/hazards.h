// Which step of a schedule waits for which.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "schedule/uses.h"

namespace rtp {

// One end of an earlier step, by its position.
struct Wait {
  int step;
  End end;
};

// For each step of a schedule of one of `ranks` ranks, what it waits for.
std::vector<std::vector<Wait>> hazards(const std::vector<Step>& steps, int ranks);

const char* name(End end);

}  // namespace rtp
