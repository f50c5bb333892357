#include "ops/bundles/cross_entropy.h"
#include "ops/bundles/experts.h"
#include "ops/bundles/mlp.h"
#include "python/internal.h"

namespace rtp {

using NoGil = py::gil_scoped_release;

void bind_bundles(py::module_& m) {
  py::class_<MlpShape>(m, "MlpShape")
      .def(py::init([](int64_t in_features, int64_t hidden_features, int64_t out_features, bool gated, bool transposed,
                       bool up_bias, bool down_bias, const std::string& activation) {
             return MlpShape{in_features, hidden_features, out_features, gated,
                             transposed,  up_bias,         down_bias,    parse_activation(activation)};
           }),
           py::kw_only(), py::arg("in_features"), py::arg("hidden_features"), py::arg("out_features"), py::arg("gated"),
           py::arg("transposed"), py::arg("up_bias"), py::arg("down_bias"), py::arg("activation"));
  py::class_<MlpResult>(m, "MlpResult")
      .def(py::init([](const at::Tensor& y, const std::vector<at::Tensor>& kept) { return MlpResult{y, kept}; }),
           py::arg("y"), py::arg("kept"))
      .def_readonly("y", &MlpResult::y)
      .def_readonly("kept", &MlpResult::kept);
  m.def("mlp_forward", &mlp_forward, py::arg("executor"), py::arg("x"), py::arg("parameters"), py::arg("shape"),
        py::arg("keep"), py::arg("options"), py::call_guard<NoGil>());
  m.def("mlp_backward", &mlp_backward, py::arg("executor"), py::arg("dy"), py::arg("x"), py::arg("kept"),
        py::arg("parameters"), py::arg("shape"), py::arg("needs_x"), py::arg("needs_parameter"), py::arg("options"),
        py::call_guard<NoGil>());

  py::class_<CrossEntropyShape>(m, "CrossEntropyShape")
      .def(py::init([](int64_t vocabulary, int64_t features, bool transposed, bool bias, int64_t ignore_index,
                       double label_smoothing, double soft_cap, double z_loss) {
             return CrossEntropyShape{vocabulary,   features,        transposed, bias,
                                      ignore_index, label_smoothing, soft_cap,   z_loss};
           }),
           py::kw_only(), py::arg("vocabulary"), py::arg("features"), py::arg("transposed"), py::arg("bias"),
           py::arg("ignore_index"), py::arg("label_smoothing"), py::arg("soft_cap"), py::arg("z_loss"));
  py::class_<CrossEntropyResult>(m, "CrossEntropyResult")
      .def_readonly("loss", &CrossEntropyResult::loss)
      .def_readonly("lse", &CrossEntropyResult::lse);
  m.def("cross_entropy_forward", &cross_entropy_forward, py::arg("executor"), py::arg("x"), py::arg("targets"),
        py::arg("parameters"), py::arg("shape"), py::arg("options"), py::call_guard<NoGil>());
  m.def("cross_entropy_backward", &cross_entropy_backward, py::arg("executor"), py::arg("dloss"), py::arg("x"),
        py::arg("targets"), py::arg("lse"), py::arg("parameters"), py::arg("shape"), py::arg("needs_x"),
        py::arg("needs_parameter"), py::arg("options"), py::call_guard<NoGil>());

  py::class_<ExpertsShape>(m, "ExpertsShape")
      .def(py::init([](int64_t experts, int64_t features, int64_t hidden_features, bool gated, bool up_bias,
                       bool down_bias, bool transposed, bool interleaved, const std::string& activation,
                       const std::optional<std::tuple<double, double>>& clamped) {
             ExpertsShape shape{experts,     features,    hidden_features,
                                gated,       up_bias,     down_bias,
                                transposed,  interleaved, parse_activation(activation),
                                std::nullopt};
             if (clamped) shape.clamped = ClampedGate{std::get<0>(*clamped), std::get<1>(*clamped)};
             return shape;
           }),
           py::kw_only(), py::arg("experts"), py::arg("features"), py::arg("hidden_features"), py::arg("gated"),
           py::arg("up_bias"), py::arg("down_bias"), py::arg("transposed"), py::arg("interleaved"),
           py::arg("activation"), py::arg("clamped"));
  py::class_<ExpertsResult>(m, "ExpertsResult")
      .def(py::init([](const std::optional<at::Tensor>& kept, const at::Tensor& order, const at::Tensor& ends,
                       const std::vector<int64_t>& starts) {
             return ExpertsResult{{}, kept.value_or(at::Tensor()), order, ends, starts};
           }),
           py::arg("kept"), py::arg("order"), py::arg("ends"), py::arg("starts"))
      .def_readonly("y", &ExpertsResult::y)
      .def_readonly("kept", &ExpertsResult::kept)
      .def_readonly("order", &ExpertsResult::order)
      .def_readonly("ends", &ExpertsResult::ends)
      .def_readonly("starts", &ExpertsResult::starts);
  m.def("experts_forward", &experts_forward, py::arg("executor"), py::arg("x"), py::arg("weights"), py::arg("index"),
        py::arg("parameters"), py::arg("shape"), py::arg("keep"), py::arg("options"), py::call_guard<NoGil>());
  m.def("experts_backward", &experts_backward, py::arg("executor"), py::arg("dy"), py::arg("x"), py::arg("weights"),
        py::arg("routed"), py::arg("parameters"), py::arg("shape"), py::arg("needs"), py::arg("options"),
        py::call_guard<NoGil>());
}

}  // namespace rtp
