#include <optional>
#include <vector>

#include "base/checks.h"
#include "python/fields.h"
#include "python/rules.h"
#include "schedule/hazards.h"

namespace rtp {
namespace {

// The name of a buffer in Python: None, "weight home", "gradient slot 1", ...
py::object buffer_name(const Buffer& buffer) {
  if (!buffer.exists()) return py::none();
  if (buffer.is_home()) return py::str(concat(name(buffer.channel), " home"));
  return py::str(concat(name(buffer.channel), " slot ", buffer.slot));
}

// The name of a buffer with the owners of its group, or its place, or halves: "weight slot 0 of 5 6 0", "gradient slot
// 2 at 1", "gradient home in halves".
py::object group_name(const Buffer& buffer, int ranks) {
  if (!buffer.exists() || !buffer.has_parts()) return buffer_name(buffer);
  auto text = py::cast<std::string>(buffer_name(buffer));
  if (buffer.at != Buffer::kAnywhere) {
    text += concat(" at ", buffer.at);
  } else if (buffer.is_group()) {
    text += " of";
    for (int each = 0; each < buffer.count; ++each) text += concat(' ', (buffer.first + each) % ranks);
  }
  return py::str(text + (buffer.halved() ? " in halves" : ""));
}

// Names with the part, if an access covers only one: "weight slot 0 place 2", "gradient slot 1 place 0 first".
std::vector<std::string> access_names(const std::vector<Access>& accesses) {
  std::vector<std::string> names;
  for (const Access& access : accesses) {
    std::string text = py::cast<std::string>(buffer_name(access.buffer));
    if (access.buffer.is_group()) text += concat(" place ", access.place);
    if (access.half != Half::whole) text += access.half == Half::first ? " first" : " second";
    names.push_back(text);
  }
  return names;
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::class_<Step>(m, "Step",
                   "One hop, compute, copy, add, gather or scatter of a schedule; fields that its action does not use "
                   "are None or -1.")
      .def_property_readonly("action", [](const Step& step) { return name(step.action); })
      .def_property_readonly("channel",
                             [](const Step& step) -> std::optional<std::string> {
                               if (step.action == Action::compute) return std::nullopt;
                               return name(step.channel);
                             })
      .def_readonly("outer", &Step::outer)
      .def_readonly("to", &Step::to)
      .def_readonly("from_", &Step::from)
      .def_readonly("send_owner", &Step::send_owner)
      .def_readonly("receive_owner", &Step::receive_owner)
      .def_property_readonly("send", [](const Step& step) { return buffer_name(step.send); })
      .def_property_readonly("receive", [](const Step& step) { return buffer_name(step.receive); })
      .def_property_readonly("compute",
                             [](const Step& step) -> std::optional<std::string> {
                               if (step.action != Action::compute) return std::nullopt;
                               return name(step.compute);
                             })
      .def_readonly("owner", &Step::owner)
      .def_readonly("owners", &Step::owners)
      .def_readonly("lane", &Step::lane)
      .def_readonly("count", &Step::count)
      .def_property_readonly("half", [](const Step& step) { return static_cast<int>(step.half); })
      .def_property_readonly("label", [](const Step& step) { return label(step); })
      .def(
          "reads", [](const Step& step, int ranks) { return access_names(reads(step, ranks)); }, py::arg("ranks"))
      .def(
          "writes", [](const Step& step, int ranks) { return access_names(writes(step, ranks)); }, py::arg("ranks"))
      .def_property_readonly("weight", [](const Step& step) { return buffer_name(step.weight); })
      .def_property_readonly("gradient_in", [](const Step& step) { return buffer_name(step.gradient_in); })
      .def_property_readonly("gradient_out", [](const Step& step) { return buffer_name(step.gradient_out); })
      .def(
          "groups",
          [](const Step& step, int ranks) {
            std::vector<py::object> names;
            for (const Buffer& buffer : {step.send, step.receive, step.weight, step.gradient_in, step.gradient_out}) {
              names.push_back(group_name(buffer, ranks));
            }
            return names;
          },
          py::arg("ranks"),
          "Its send, receive, weight, gradient_in and gradient_out, with the owners of a group, a place or halves: "
          "'weight slot 0 of 5 6 0', 'gradient slot 2 at 1', 'gradient home in halves'.");
  py::class_<Schedule>(m, "Schedule", "The ordered hops and computes of one pass on one rank.")
      .def_readonly("ranks", &Schedule::ranks)
      .def_readonly("rank", &Schedule::rank)
      .def_property_readonly("pass_", [](const Schedule& schedule) { return name(schedule.options.pass); })
      .def_property_readonly("route", [](const Schedule& schedule) { return name(schedule.options.route); })
      .def_property_readonly("in_place", [](const Schedule& schedule) { return schedule.options.in_place; })
      .def_property_readonly("halves", [](const Schedule& schedule) { return schedule.options.halves; })
      .def_property_readonly("late", [](const Schedule& schedule) { return schedule.options.late; })
      .def_property_readonly("two_lanes", [](const Schedule& schedule) { return schedule.options.two_lanes; })
      .def_property_readonly("hosts", [](const Schedule& schedule) { return schedule.options.hosts; })
      .def_property_readonly("gradient_route",
                             [](const Schedule& schedule) { return name(schedule.options.gradient_route); })
      .def_property_readonly("narrow", [](const Schedule& schedule) { return schedule.options.narrow; })
      .def_property_readonly("apart", [](const Schedule& schedule) { return schedule.options.apart; })
      .def_property_readonly("collective", [](const Schedule& schedule) { return schedule.options.collective; })
      .def_readonly("steps", &Schedule::steps)
      .def_property_readonly("group", [](const Schedule& schedule) { return schedule.options.group; })
      .def_property_readonly("weight_slots", [](const Schedule& schedule) { return schedule.weight_slots.size(); })
      .def_property_readonly("gradient_slots", [](const Schedule& schedule) { return schedule.gradient_slots.size(); })
      .def_property_readonly(
          "slot_shards",
          [](const Schedule& schedule) { return std::pair(schedule.weight_slots, schedule.gradient_slots); },
          "The number of shards that each slot of weights, and each of gradients, holds.");
  Fields<ScheduleOptions> fields("make_schedule");
  fields.required("pass_", &ScheduleOptions::pass)
      .optional("route", &ScheduleOptions::route)
      .optional("in_place", &ScheduleOptions::in_place)
      .optional("dgrad", &ScheduleOptions::dgrad)
      .optional("wgrad", &ScheduleOptions::wgrad)
      .optional("receive_in_slots", &ScheduleOptions::receive_in_slots)
      .optional("bundle", &ScheduleOptions::bundle)
      .optional("halves", &ScheduleOptions::halves)
      .optional("two_lanes", &ScheduleOptions::two_lanes)
      .optional("late", &ScheduleOptions::late)
      .optional("hosts", &ScheduleOptions::hosts)
      .optional("gradient_route", &ScheduleOptions::gradient_route)
      .optional("narrow", &ScheduleOptions::narrow)
      .optional("apart", &ScheduleOptions::apart)
      .optional("sourced", &ScheduleOptions::sourced)
      .optional("group", &ScheduleOptions::group)
      .optional("collective", &ScheduleOptions::collective);
  m.def(
      "make_schedule",
      [fields](int ranks, int rank, const py::kwargs& options) {
        return make_schedule(ranks, rank, fields.make(options));
      },
      py::arg("ranks"), py::arg("rank"));
  m.def(
      "hazards",
      [](const std::vector<Step>& steps, int ranks) {
        std::vector<std::vector<std::pair<int, std::string>>> named;
        for (const auto& waits : hazards(steps, ranks)) {
          named.emplace_back();
          for (const Wait& wait : waits) named.back().emplace_back(wait.step, name(wait.end));
        }
        return named;
      },
      py::arg("steps"), py::arg("ranks"),
      "For each step, the earlier steps that it waits for: position, and end (received, sent or done).");
}

}  // namespace rtp
