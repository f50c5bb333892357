// Operations whose weights travel together, in Python: MLPs, vocabulary heads with their loss, experts.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rtp {

void bind_bundles(py::module_& m);

}  // namespace rtp
