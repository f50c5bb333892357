// The rules that planner and gate share with the engine: what rotation takes of memory, and how tiles fill a device.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rtp {

void bind_footprint(py::module_& m);

}  // namespace rtp
