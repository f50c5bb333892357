// Schedules for Python, and the names by which Python calls what they are made of.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "schedule/schedule.h"

namespace rtp {

// ValueError for any other text.
Pass parse_pass(const std::string& text);
Route parse_route(const std::string& text);
GradientRoute parse_gradient_route(const std::string& text);
Channel parse_channel(const std::string& text);

void bind_schedule(py::module_& m);

}  // namespace rtp
