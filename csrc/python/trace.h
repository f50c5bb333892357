// The recorder of an executor for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "engine/executor.h"

namespace rtp {

void bind_trace(py::class_<Executor, std::shared_ptr<Executor>>& executor);

}  // namespace rtp
