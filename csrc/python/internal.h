// Declarations shared by the files of this folder: the parts of the extension module, and conversions between the enums
// of a schedule and their Python names.
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

// The rules that the planner and the RoutePlanner share with the engine: memory of rotation, and waves of tiles.
void bind_footprint(py::module_& m);

// Operations whose weights travel as a bundle: MLPs, vocabulary heads with their loss, experts.
void bind_bundles(py::module_& m);

// Creates the submodule `kernels`: CUDA kernels and the corresponding ATen paths, for tests and benchmarks.
void bind_kernels(py::module_& m);

// Passes as CUDA graphs.
void bind_graphs(py::module_& m, ExecutorClass& executor);

// The record of a ring's most recent events, and checksums of its hops.
void bind_recorder(py::module_& m, ExecutorClass& executor);

// The trace of an executor's streams.
void bind_trace(ExecutorClass& executor);

// ValueError for any other text.
Pass parse_pass(const std::string& text);
Route parse_route(const std::string& text);
GradientRoute parse_gradient_route(const std::string& text);
Channel parse_channel(const std::string& text);

// What weights travel in; none: in what they are computed with. ValueError for any other text.
Wire parse_wire(const std::optional<std::string>& travel);

}  // namespace rtp
