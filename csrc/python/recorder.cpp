#include <string_view>

#include "base/crc32c.h"
#include "python/internal.h"
#include "transport/checked.h"

namespace rtp {

void bind_recorder(py::module_& m, ExecutorClass& executor) {
  executor
      .def(
          "identify",
          [](Executor& e, const std::string& ring, const std::string& transport, const std::string& host) {
            e.trace().recorder().identify({e.rank(), e.ranks(), ring, transport, host, e.device().is_cpu()});
          },
          py::arg("ring"), py::arg("transport"), py::arg("host"))
      .def(
          "record", [](Executor& e, const std::string& reason) { return e.trace().recorder().dump(reason); },
          py::arg("reason"), "Writes the most recent events of the ring to a file, and returns its path.")
      .def(
          "enable_recorder", [](Executor& e, bool on) { e.trace().recorder().enable(on); }, py::arg("on"))
      .def(
          "begin_collective", [](Executor& e, const std::string& name) { return e.trace().begin_collective(name); },
          py::arg("name"))
      .def("meet", &Executor::meet, py::arg("collective"), py::call_guard<py::gil_scoped_release>(),
           "Raises RotationError where the previous rank has come to another operation. Collective, on the host.")
      .def(
          "count_update", [](Executor& e) { e.hops().count_update(); },
          "An optimizer has updated parameters of the ring.")
      .def(
          "end_collective", [](Executor& e, uint64_t number) { e.trace().end_collective(number); }, py::arg("number"))
      .def("last_hop", [](Executor& e) { return e.trace().recorder().last_hop(); });
  m.def("record_on_signal", &Recorder::take_signal,
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
