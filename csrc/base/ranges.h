// Named ranges for profilers (NVTX).
#pragma once

#include <string>

namespace rtp {

// Whether a profiler listens; without one, naming ranges would be for nothing.
bool profiled();

void push_range(const std::string& name);
void pop_range();

}  // namespace rtp
