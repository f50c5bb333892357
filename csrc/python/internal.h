// Declarations shared by the files of this folder: the parts of the extension module, and conversions between the enums
// of a schedule and their Python names.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "compute/activation.h"
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

// Enums are texts in Python. ValueError for any other text.
void parse(const std::string& text, Pass& parsed);
void parse(const std::string& text, Route& parsed);
void parse(const std::string& text, GradientRoute& parsed);
void parse(const std::string& text, Channel& parsed);
void parse(const std::string& text, Wire& parsed);
void parse(const std::string& text, BlockFormat& parsed);
const char* name(BlockFormat format);
void parse(const std::string& text, Activation& parsed);

}  // namespace rtp

namespace pybind11::detail {

template <typename Enum>
struct text_caster {
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));

  bool load(handle source, bool) {
    if (!PyUnicode_Check(source.ptr())) return false;
    rtp::parse(source.cast<std::string>(), value);
    return true;
  }
  static handle cast(Enum value, return_value_policy, handle) { return pybind11::str(rtp::name(value)).release(); }
};

template <>
struct type_caster<rtp::Pass> : text_caster<rtp::Pass> {};
template <>
struct type_caster<rtp::Route> : text_caster<rtp::Route> {};
template <>
struct type_caster<rtp::GradientRoute> : text_caster<rtp::GradientRoute> {};
template <>
struct type_caster<rtp::Channel> : text_caster<rtp::Channel> {};
template <>
struct type_caster<rtp::Activation> : text_caster<rtp::Activation> {};

template <>
struct type_caster<rtp::BlockFormat> : text_caster<rtp::BlockFormat> {};

// The dtype in which weights travel. None: the compute dtype.
template <>
struct type_caster<rtp::Wire> : text_caster<rtp::Wire> {
  bool load(handle source, bool convert) {
    if (!source.is_none()) return text_caster<rtp::Wire>::load(source, convert);
    value = rtp::Wire::plain;
    return true;
  }
};

}  // namespace pybind11::detail
