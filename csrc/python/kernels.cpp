#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "compute/activation.h"
#include "compute/codes.h"
#include "compute/frozen_blocks.h"
#include "compute/gemm/gemm.h"
#include "compute/gemm/grouped.h"
#include "compute/logits.h"
#include "compute/pack.h"
#include "compute/quantize.h"
#include "compute/vectorised.h"
#include "ops/embedding.h"
#include "python/internal.h"

namespace rtp {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

}  // namespace

void bind_kernels(py::module_& parent) {
  py::module_ m =
      parent.def_submodule("kernels", "Steps of operations: CUDA kernels of this package on a GPU, ATen on a CPU.");
  m.def(
      "hidden_forward",
      [](Activation activation, const at::Tensor& pre, const OptionalTensor& gate) {
        return hidden_forward(activation, pre, or_undefined(gate));
      },
      py::arg("activation"), py::arg("pre"), py::arg("gate") = py::none());
  m.def(
      "hidden_backward",
      [](Activation activation, const at::Tensor& d_value, const at::Tensor& pre, const OptionalTensor& gate) {
        const at::Tensor d_pre = at::empty_like(pre);
        const OptionalTensor d_gate = gate ? OptionalTensor(at::empty_like(*gate)) : std::nullopt;
        hidden_backward(activation, d_value, pre, or_undefined(gate), d_pre, or_undefined(d_gate));
        return std::tuple(d_value, d_pre, d_gate);
      },
      py::arg("activation"), py::arg("d_value"), py::arg("pre"), py::arg("gate") = py::none());
  py::class_<LogitChunk>(m, "LogitChunk")
      .def(py::init([](const at::Tensor& logits, const at::Tensor& targets, int64_t first_column, int64_t ignore_index,
                       double soft_cap) { return LogitChunk{logits, targets, first_column, ignore_index, soft_cap}; }),
           py::arg("logits"), py::arg("targets"), py::kw_only(), py::arg("first_column") = 0,
           py::arg("ignore_index") = -100, py::arg("soft_cap") = 0.0);
  m.def(
      "add_logits",
      [](const LogitChunk& chunk, const at::Tensor& most, const at::Tensor& scaled, const at::Tensor& hit,
         const OptionalTensor& total) { add_logits(chunk, {most, scaled, hit, or_undefined(total)}); },
      py::arg("chunk"), py::arg("most"), py::arg("scaled"), py::arg("hit"), py::arg("total") = py::none());
  m.def(
      "logit_gradient",
      [](const LogitChunk& chunk, const at::Tensor& most, const at::Tensor& factor, const at::Tensor& upstream,
         double label_smoothing, double everywhere, at::ScalarType dtype) {
        return logit_gradient(chunk, {most, factor, upstream, label_smoothing, everywhere}, dtype);
      },
      py::arg("chunk"), py::arg("most"), py::arg("factor"), py::arg("upstream"), py::kw_only(),
      py::arg("label_smoothing"), py::arg("everywhere"), py::arg("dtype"));
  m.def("grouped_refusal", &grouped_refusal, py::arg("rows"), py::arg("stack"));
  m.def("grouped_product", &grouped_product, py::arg("rows"), py::arg("stack"), py::arg("ends"));
  m.def("choose_grouped_as_on", &choose_grouped_as_on, py::arg("capability"));
  m.def("gather_rows", &gather_rows, py::arg("ids"), py::arg("table"), py::arg("first_row"), py::arg("out"));
  m.def("add_rows", &add_rows, py::arg("out"), py::arg("ids"), py::arg("values"), py::arg("first_row"),
        py::arg("padding_idx"), py::arg("alpha"));
  m.def(
      "pack",
      [](const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
        RTP_CHECK_VALUE(from.size() == to.size(), "expected ", from.size(), " places, got ", to.size());
        std::vector<PackItem> items;
        for (size_t i = 0; i < from.size(); ++i) items.push_back({from[i], to[i]});
        pack(items);
      },
      py::arg("from_"), py::arg("to"));
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", &instruction_set_name);
  m.def("set_instruction_set", &set_instruction_set, py::arg("name"));
  m.def("quantized_bytes", &quantized_bytes, py::arg("numbers"));
  m.def("quantize", &quantize, py::arg("bytes"), py::arg("values"));
  m.def("dequantize", &dequantize, py::arg("out"), py::arg("bytes"));
  m.def("dequantize_add", &dequantize_add, py::arg("sum"), py::arg("bytes"));
  const py::module_ rules = py::module_::import("rtp_ext._R");
  for (const char* name : {"block_layout", "rows_of_blocks"}) m.attr(name) = rules.attr(name);
  m.def(
      "code_numbers",
      [](BlockFormat format) {
        RTP_CHECK_VALUE(format != BlockFormat::int8, "expected a format whose codes have 4 bits, got int8");
        const float* const numbers = code_numbers(format);
        return std::vector<float>(numbers, numbers + 16);
      },
      py::arg("format"));
  m.def("dequantize_blocks", &dequantize_blocks, py::arg("out"), py::arg("blocks"), py::arg("format"));
  m.def(
      "block_amax",
      [](const at::Tensor& amax, const at::Tensor& values, std::pair<int64_t, int64_t> block) {
        block_amax(amax, values, {block.first, block.second});
      },
      py::arg("amax"), py::arg("values"), py::arg("block"));
  m.def(
      "quantize_codes",
      [](const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values, const OptionalTensor& amax,
         std::pair<int64_t, int64_t> block,
         ScaleRule rule) { quantize_codes(codes, scales, values, amax, {block.first, block.second}, rule); },
      py::arg("codes"), py::arg("scales"), py::arg("values"), py::arg("amax"), py::arg("block"), py::arg("rule"));
  m.def("add_converted", &add_converted, py::arg("sum"), py::arg("values"));
  m.def(
      "gemm",
      [](const at::Tensor& out, const OptionalTensor& in, const at::Tensor& a, const at::Tensor& b, double alpha) {
        gemm(out, or_undefined(in), a, b, alpha);
      },
      py::arg("out"), py::arg("in_"), py::arg("a"), py::arg("b"), py::arg("alpha") = 1.0);
}

}  // namespace rtp
