// Passes as CUDA graphs.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "engine/executor.h"

namespace rtp {

void bind_graphs(py::module_& m, py::class_<Executor, std::shared_ptr<Executor>>& executor);

}  // namespace rtp
