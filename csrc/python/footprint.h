// The rules that planner and gate share with the engine: what rotation takes of memory, and how tiles fill a device.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "schedule/footprint.h"

namespace rtp {

// What weights travel in; none: in what they are computed with. ValueError for any other text.
Wire parse_wire(const std::optional<std::string>& travel);

void bind_footprint(py::module_& m);

}  // namespace rtp
