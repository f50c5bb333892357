#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "base/crc32c.h"
#include "python/internal.h"
#include "transport/checked.h"

namespace rtp {
namespace {

// The arguments of make_schedule.
py::dict keywords(const ScheduleOptions& options) {
  py::dict made;
  made["pass_"] = name(options.pass);
  made["route"] = name(options.route);
  made["in_place"] = options.in_place;
  made["dgrad"] = options.dgrad;
  made["wgrad"] = options.wgrad;
  made["receive_in_slots"] = options.receive_in_slots;
  made["bundle"] = options.bundle;
  made["halves"] = options.halves;
  made["two_lanes"] = options.two_lanes;
  made["late"] = options.late;
  made["hosts"] = options.hosts;
  made["gradient_route"] = name(options.gradient_route);
  made["narrow"] = options.narrow;
  made["apart"] = options.apart;
  made["group"] = options.group;
  made["collective"] = options.collective;
  if (options.sourced) made["sourced"] = true;
  return made;
}

py::tuple read_trace(Executor& executor) {
  Sink::Trace result;
  {
    const py::gil_scoped_release release;
    result = executor.sink().read_trace();
  }
  py::list passes, events;
  for (const auto& pass : result.passes) {
    passes.append(py::make_tuple(pass->operation, keywords(pass->options), pass->began, pass->ended));
  }
  for (const auto& event : result.events) {
    events.append(py::make_tuple(event->pass ? event->pass->number : -1, event->operation, event->step,
                                 name(event->kind), name(event->lane), event->label, event->began, event->ended,
                                 event->posted));
  }
  return py::make_tuple(result.zero, result.captured, passes, events);
}

}  // namespace

void bind_sink(py::module_& m, ExecutorClass& executor) {
  executor
      .def(
          "identify",
          [](Executor& e, const std::string& ring, const std::string& transport, const std::string& host) {
            e.sink().identify({e.rank(), e.ranks(), ring, transport, host, e.device().is_cpu()});
          },
          py::arg("ring"), py::arg("transport"), py::arg("host"))
      .def(
          "record", [](Executor& e, const std::string& reason) { return e.sink().write_record(reason); },
          py::arg("reason"), "Writes the most recent events of the ring to a file, and returns its path.")
      .def(
          "enable_recorder", [](Executor& e, bool on) { e.sink().enable(on); }, py::arg("on"))
      .def(
          "begin_collective", [](Executor& e, const std::string& name) { return e.sink().begin_collective(name); },
          py::arg("name"))
      .def("meet", &Executor::meet, py::arg("collective"), py::call_guard<py::gil_scoped_release>(),
           "Raises RotationError where the previous rank has come to another operation. Collective, on the host.")
      .def(
          "count_update", [](Executor& e) { e.hops().count_update(); },
          "An optimizer has updated parameters of the ring.")
      .def(
          "end_collective", [](Executor& e, uint64_t number) { e.sink().end_collective(number); }, py::arg("number"))
      .def("trace", &Executor::set_trace, py::arg("on"), py::call_guard<py::gil_scoped_release>())
      .def("read_trace", &read_trace)
      .def("last_hop", [](Executor& e) { return e.sink().last_hop(); });
  m.def("record_on_signal", &Sink::take_signal,
        "Makes SIGUSR1 write the records of all rings. Returns false if the signal has another handler.");
  py::class_<CheckedTransport, Transport, std::shared_ptr<CheckedTransport>>(m, "CheckedTransport")
      .def(py::init(&make_checked_transport), py::arg("inner"), py::arg("ranks"), py::arg("verify") = true)
      .def("flip", &CheckedTransport::flip);
  const auto sum = [](const py::bytes& text, bool by_table) {
    const std::string_view view = text;
    return by_table ? crc32c_by_table(view.data(), view.size()) : crc32c(view.data(), view.size());
  };
  m.def("crc32c", sum, py::arg("text"), py::arg("by_table") = false);
}

}  // namespace rtp
