// The bindings that need no torch, and the names of enums in Python, which the other bindings use too.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "schedule/footprint.h"
#include "schedule/schedule.h"

namespace py = pybind11;

namespace rtp {

// Schedules.
void bind_schedule(py::module_& m);

// The rules that the planner and the RoutePlanner share with the engine: memory of rotation, and waves of tiles.
void bind_footprint(py::module_& m);

// Enums are texts in Python. ValueError for any other text.
void parse(const std::string& text, Pass& parsed);
void parse(const std::string& text, Route& parsed);
void parse(const std::string& text, GradientRoute& parsed);
void parse(const std::string& text, Channel& parsed);
void parse(const std::string& text, TravelFormat& parsed);
void parse(const std::string& text, BlockFormat& parsed);
void parse(const std::string& text, ScaleRule& parsed);
void parse(const std::string& text, CodeFormat& parsed);
const char* name(BlockFormat format);
const char* name(ScaleRule rule);
const char* name(CodeFormat format);

}  // namespace rtp

namespace pybind11::detail {

template <typename Enum>
struct text_caster {
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));

  bool load(handle source, bool) {
    if (!PyUnicode_Check(source.ptr())) return false;
    parse(source.cast<std::string>(), value);  // of the enum's namespace, wherever it is declared
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
struct type_caster<rtp::BlockFormat> : text_caster<rtp::BlockFormat> {};
template <>
struct type_caster<rtp::ScaleRule> : text_caster<rtp::ScaleRule> {};
template <>
struct type_caster<rtp::CodeFormat> : text_caster<rtp::CodeFormat> {};

// The dtype in which weights travel. None: the compute dtype.
template <>
struct type_caster<rtp::TravelFormat> : text_caster<rtp::TravelFormat> {
  bool load(handle source, bool convert) {
    if (!source.is_none()) return text_caster<rtp::TravelFormat>::load(source, convert);
    value = rtp::TravelFormat::plain;
    return true;
  }
};

}  // namespace pybind11::detail
