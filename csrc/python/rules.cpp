// The rules of the engine that need no torch: schedules, memory of rotation, waves of tiles. The planner loads them
// alone, within milliseconds.
#include "python/rules.h"

PYBIND11_MODULE(_R, m) {
  m.doc() = "The rules of the rotation engine of rtp_ext.";
  rtp::bind_schedule(m);
  rtp::bind_footprint(m);
}
