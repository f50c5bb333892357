#include "ops/bundles/cross_entropy.h"
#include "ops/bundles/experts.h"
#include "ops/bundles/mlp.h"
#include "python/fields.h"
#include "python/internal.h"

namespace rtp {

void parse(const std::string& text, Activation& parsed) { parsed = parse_activation(text); }

void bind_bundles(py::module_& m) {
  Fields<MlpShape>("MlpShape")
      .required("in_features", &MlpShape::in_features)
      .required("hidden_features", &MlpShape::hidden_features)
      .required("out_features", &MlpShape::out_features)
      .required("gated", &MlpShape::gated)
      .required("transposed", &MlpShape::transposed)
      .required("up_bias", &MlpShape::up_bias)
      .required("down_bias", &MlpShape::down_bias)
      .required("activation", &MlpShape::activation)
      .optional("frozen", &MlpShape::frozen)
      .bind(m);
  m.def("mlp_forward", &mlp_forward, py::arg("executor"), py::arg("x"), py::arg("parameters"), py::arg("shape"),
        py::arg("keep"), py::arg("options"), py::call_guard<OperationScope>());
  m.def("mlp_backward", &mlp_backward, py::arg("executor"), py::arg("dy"), py::arg("x"), py::arg("kept"),
        py::arg("group"), py::arg("parameters"), py::arg("shape"), py::arg("needs_x"), py::arg("needs_parameter"),
        py::arg("options"), py::call_guard<OperationScope>());

  Fields<CrossEntropyShape>("CrossEntropyShape")
      .required("vocabulary", &CrossEntropyShape::vocabulary)
      .required("features", &CrossEntropyShape::features)
      .required("transposed", &CrossEntropyShape::transposed)
      .required("bias", &CrossEntropyShape::bias)
      .required("ignore_index", &CrossEntropyShape::ignore_index)
      .required("label_smoothing", &CrossEntropyShape::label_smoothing)
      .required("soft_cap", &CrossEntropyShape::soft_cap)
      .required("z_loss", &CrossEntropyShape::z_loss)
      .optional("frozen", &CrossEntropyShape::frozen)
      .bind(m);
  py::class_<CrossEntropyResult>(m, "CrossEntropyResult")
      .def_readonly("loss", &CrossEntropyResult::loss)
      .def_readonly("lse", &CrossEntropyResult::lse);
  m.def("cross_entropy_forward", &cross_entropy_forward, py::arg("executor"), py::arg("x"), py::arg("targets"),
        py::arg("parameters"), py::arg("shape"), py::arg("options"), py::call_guard<OperationScope>());
  m.def("cross_entropy_backward", &cross_entropy_backward, py::arg("executor"), py::arg("dloss"), py::arg("x"),
        py::arg("targets"), py::arg("lse"), py::arg("parameters"), py::arg("shape"), py::arg("needs_x"),
        py::arg("needs_parameter"), py::arg("options"), py::call_guard<OperationScope>());

  Fields<ClampedGate>("ClampedGate")
      .required("alpha", &ClampedGate::alpha)
      .required("limit", &ClampedGate::limit)
      .bind(m);
  Fields<ExpertsShape>("ExpertsShape")
      .required("experts", &ExpertsShape::experts)
      .required("features", &ExpertsShape::features)
      .required("hidden_features", &ExpertsShape::hidden_features)
      .required("gated", &ExpertsShape::gated)
      .required("up_bias", &ExpertsShape::up_bias)
      .required("down_bias", &ExpertsShape::down_bias)
      .required("transposed", &ExpertsShape::transposed)
      .required("interleaved", &ExpertsShape::interleaved)
      .required("activation", &ExpertsShape::activation)
      .required("clamped", &ExpertsShape::clamped)
      .optional("gate_apart", &ExpertsShape::gate_apart)
      .optional("up_frozen", &ExpertsShape::up_frozen)
      .optional("down_frozen", &ExpertsShape::down_frozen)
      .optional("starts", &ExpertsShape::starts)
      .optional("codes", &ExpertsShape::codes)
      .optional("scaled", &ExpertsShape::scaled)
      .bind(m);
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
        py::arg("parameters"), py::arg("shape"), py::arg("keep"), py::arg("options"), py::call_guard<OperationScope>());
  m.def("experts_backward", &experts_backward, py::arg("executor"), py::arg("dy"), py::arg("x"), py::arg("weights"),
        py::arg("routed"), py::arg("parameters"), py::arg("shape"), py::arg("needs"), py::arg("options"),
        py::call_guard<OperationScope>());
}

}  // namespace rtp
