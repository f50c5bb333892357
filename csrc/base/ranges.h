// Named ranges for profilers (NVTX): one for each step of a schedule.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace rtp {

// "linear forward: W2 -> 3, W1 <- 1"
void push_range(const std::string& operation, const Step& step);
void pop_range();

}  // namespace rtp
