// What a ring did last, and checksums of its hops, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "engine/executor.h"

namespace rtp {

void bind_recorder(py::module_& m, py::class_<Executor, std::shared_ptr<Executor>>& executor);

}  // namespace rtp
