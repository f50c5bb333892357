// What the files of this folder have for each other: the parts of the extension, and Python's names for what a schedule
// is made of.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "engine/executor.h"
#include "schedule/footprint.h"
#include "schedule/schedule.h"

namespace rtp {

using ExecutorClass = py::class_<Executor, std::shared_ptr<Executor>>;

// Schedules.
void bind_schedule(py::module_& m);

// The rules that planner and gate share with the engine: what rotation takes of memory, and how tiles fill a device.
void bind_footprint(py::module_& m);

// Operations whose weights travel together: MLPs, vocabulary heads with their loss, experts.
void bind_bundles(py::module_& m);

// Makes the submodule `kernels`: what tests and benchmarks call of our kernels and of the ATen paths beside them.
void bind_kernels(py::module_& m);

// Passes as CUDA graphs.
void bind_graphs(py::module_& m, ExecutorClass& executor);

// What a ring did last, and checksums of its hops.
void bind_recorder(py::module_& m, ExecutorClass& executor);

// The recorder of what the lanes of an executor did when.
void bind_trace(ExecutorClass& executor);

// ValueError for any other text.
Pass parse_pass(const std::string& text);
Route parse_route(const std::string& text);
GradientRoute parse_gradient_route(const std::string& text);
Channel parse_channel(const std::string& text);

// What weights travel in; none: in what they are computed with. ValueError for any other text.
Wire parse_wire(const std::optional<std::string>& travel);

}  // namespace rtp
