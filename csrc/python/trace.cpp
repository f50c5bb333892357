#include <torch/csrc/utils/pybind.h>

#include "python/internal.h"

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
  made["two_lanes"] = options.two_streams;
  made["late"] = options.deferred;
  made["hosts"] = options.hosts;
  made["gradient_route"] = name(options.gradient_route);
  made["narrow"] = options.rounded;
  if (options.sourced) made["sourced"] = true;
  return made;
}

py::tuple read_trace(Executor& executor) {
  Trace::Result result;
  {
    const py::gil_scoped_release release;
    result = executor.trace().read();
  }
  py::list passes, events;
  for (const Trace::Pass& pass : result.passes) {
    passes.append(py::make_tuple(pass.operation, keywords(pass.options), pass.start, pass.end));
  }
  for (const Trace::Event& event : result.events) {
    events.append(py::make_tuple(event.pass, event.operation, event.step, name(event.kind), name(event.lane),
                                 event.label, event.start, event.end, event.posted));
  }
  return py::make_tuple(result.zero, result.captured, passes, events);
}

}  // namespace

void bind_trace(ExecutorClass& executor) {
  executor.def("trace", &Executor::set_trace, py::arg("on"), py::call_guard<py::gil_scoped_release>())
      .def("read_trace", &read_trace);
}

}  // namespace rtp
