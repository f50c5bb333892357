// Structs that Python fills by keyword: each field is named once, with the member that it sets.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/checks.h"

namespace py = pybind11;

namespace rtp {

// The fields of `Struct`. A member is a pointer to one, or a function from the struct to a reference.
template <typename Struct>
class Fields {
 public:
  explicit Fields(std::string name) : name_(std::move(name)) {}

  // A field that has to be given.
  template <typename Member>
  Fields& required(const char* name, Member member) {
    return add(name, member, true);
  }

  // A field that keeps the value of the struct where it is not given.
  template <typename Member>
  Fields& optional(const char* name, Member member) {
    return add(name, member, false);
  }

  // Throws TypeError for a keyword that is no field, for a missing keyword, and for a value of another type.
  Struct make(const py::kwargs& given) const {
    Struct made;
    size_t taken = 0;
    for (const Field& field : fields_) {
      if (given.contains(field.name)) {
        ++taken;
        if (!field.set(made, given[field.name])) {
          throw py::type_error(concat(name_, ": unexpected type of ", field.name));
        }
      } else if (field.required) {
        throw py::type_error(concat(name_, ": expected the keyword ", field.name));
      }
    }
    if (taken < given.size()) refuse_unknown(given);
    return made;
  }

  // Binds the struct as a class without attributes: what Python has made of it stays as it is.
  py::class_<Struct> bind(py::module_& m) const {
    return py::class_<Struct>(m, name_.c_str()).def(py::init([fields = *this](const py::kwargs& given) {
      return fields.make(given);
    }));
  }

 private:
  struct Field {
    const char* name;
    bool required;
    std::function<bool(Struct&, const py::handle&)> set;
  };

  template <typename Member>
  Fields& add(const char* name, Member member, bool required) {
    using Value = std::decay_t<std::invoke_result_t<Member, Struct&>>;
    fields_.push_back({name, required, [member](Struct& made, const py::handle& value) {
                         py::detail::make_caster<Value> caster;
                         if (!caster.load(value, true)) return false;
                         std::invoke(member, made) = py::detail::cast_op<Value>(std::move(caster));
                         return true;
                       }});
    return *this;
  }

  void refuse_unknown(const py::kwargs& given) const {
    for (const auto& [key, value] : given) {
      const auto name = key.template cast<std::string>();
      bool known = false;
      for (const Field& field : fields_) known = known || name == field.name;
      if (!known) throw py::type_error(concat(name_, ": unexpected keyword ", name));
    }
  }

  std::string name_;
  std::vector<Field> fields_;
};

}  // namespace rtp
