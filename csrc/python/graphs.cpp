#include "engine/pass_graph.h"
#include "python/internal.h"

namespace rtp {

using NoGil = py::gil_scoped_release;

void bind_graphs(py::module_& m, ExecutorClass& executor) {
  py::class_<PassGraph, std::shared_ptr<PassGraph>>(m, "PassGraph", "A pass that was captured.")
      .def_property_readonly("idle", &PassGraph::idle)
      .def_readonly("generation", &PassGraph::generation);
  executor.def("takes_graphs", &Executor::takes_graphs, "Returns whether its passes can be CUDA graphs.")
      .def("fix_slots", &Executor::fix_slots, py::call_guard<NoGil>())
      .def(
          "generation", [](Executor& e) { return e.pool().generation(); }, "Generation of the slots that graphs use.")
      .def(
          "captured", [](Executor& e) { return e.streams().capture() != 0; }, "Whether the caller captures a graph.")
      .def("traced", [](Executor& e) { return e.sink().tracing(); })
      .def(
          "note_results", [](Executor& e) { e.results().note(); },
          "Records the tensors that the next pass returns: results().")
      .def(
          "give_results", [](Executor& e, std::vector<at::Tensor> places) { e.results().give(std::move(places)); },
          py::arg("places"), "Makes the next pass return these tensors.")
      .def(
          "result",
          [](Executor& e, const std::vector<int64_t>& shape, at::ScalarType dtype) {
            return e.results().empty(shape, at::TensorOptions().dtype(dtype).device(e.device()));
          },
          py::arg("shape"), py::arg("dtype"), "Returns memory for a result of an operation.")
      .def("results", [](Executor& e) { return e.results().requested(); })
      .def("clear_results", [](Executor& e) { e.results().clear(); })
      .def("begin_graph_stream", &Executor::begin_graph_stream, py::arg("captured"), py::call_guard<NoGil>())
      .def("end_graph_stream", &Executor::end_graph_stream, py::arg("operation"), py::call_guard<NoGil>())
      .def("abandon_graph_stream", &Executor::abandon_graph_stream, py::call_guard<NoGil>())
      .def("replay", &Executor::replay, py::arg("graph"), py::call_guard<NoGil>());
}

}  // namespace rtp
