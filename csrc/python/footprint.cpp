#include "schedule/footprint.h"

#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "python/fields.h"
#include "python/rules.h"
#include "schedule/tile_waves.h"

namespace rtp {

void bind_footprint(py::module_& m) {
  py::class_<SlotCount>(m, "SlotCount")
      .def_readonly("slots", &SlotCount::slots)
      .def_readonly("bytes", &SlotCount::bytes)
      .def_readonly("peak_slots", &SlotCount::peak_slots)
      .def_readonly("peak_bytes", &SlotCount::peak_bytes)
      .def_readonly("allocations", &SlotCount::allocations);
  py::class_<Footprint>(m, "Footprint", "What the pools of a ring hold once a step repeats.")
      .def_readonly("weight", &Footprint::weight)
      .def_readonly("gradient", &Footprint::gradient)
      .def_readonly("scratch", &Footprint::scratch)
      .def_readonly("free_weight", &Footprint::free_weight)
      .def_readonly("free_gradient", &Footprint::free_gradient)
      .def_readonly("mailboxes", &Footprint::mailboxes);
  py::class_<OperationKind>(m, "OperationKind", "A row of the table of operations.")
      .def_readonly("key", &OperationKind::key)
      .def_readonly("bundle", &OperationKind::bundle)
      .def_readonly("late", &OperationKind::late)
      .def_readonly("groups", &OperationKind::groups)
      .def_readonly("dgrad", &OperationKind::dgrad)
      .def_readonly("captured", &OperationKind::captured)
      .def_readonly("dims", &OperationKind::dims);
  m.def("operation_kinds", []() { return std::vector<OperationKind>(std::begin(kOperations), std::end(kOperations)); });
  m.def(
      "operation_kind", [](const std::string& key) { return operation_kind(key); }, py::arg("key"),
      "The row of an operation; the usual facts for one without a row.");
  py::class_<CodePlane>(m, "CodePlane",
                        "How a matrix becomes codes of 8 bits with a scale a block; 0: all rows, or columns.")
      .def(py::init<int64_t, int64_t, ScaleRule, bool, CodeFormat, bool, bool>(), py::arg("rows"), py::arg("columns"),
           py::arg("rule"), py::arg("transposed"), py::arg("format"), py::arg("padded"), py::arg("whole"))
      .def_property_readonly("by_columns", &CodePlane::by_columns)
      .def("stacks", &CodePlane::stacks, py::arg("summed"))
      .def("joins", &CodePlane::joins)
      .def("scale_shape", &CodePlane::scale_shape, py::arg("rows"), py::arg("columns"))
      .def("scale_memory", &CodePlane::scale_memory, py::arg("rows"), py::arg("columns"))
      .def("bytes", &CodePlane::bytes, py::arg("rows"), py::arg("columns"));
  py::class_<CodePlanes>(m, "CodePlanes", "The planes in which a weight travels forward and backward.")
      .def(py::init<CodePlane, CodePlane>(), py::arg("forward"), py::arg("backward"));
  py::class_<ParameterFacts>(m, "ParameterFacts", "A parameter of a whole shape that a ring cuts.")
      .def(py::init<std::vector<int64_t>, size_t, std::optional<BlockFormat>, int64_t, bool, std::optional<CodePlanes>,
                    bool>(),
           py::arg("shape"), py::arg("dim") = 0, py::arg("frozen") = std::nullopt, py::arg("group") = 0,
           py::arg("trained") = true, py::arg("codes") = std::nullopt, py::arg("inputs_first") = false)
      .def_property_readonly("rows_of_group", &ParameterFacts::rows_of_group)
      .def("sizes", &ParameterFacts::sizes, py::arg("ranks"))
      .def("shard", &ParameterFacts::shard, py::arg("ranks"), py::arg("owner"))
      .def("pulled_bytes", &ParameterFacts::pulled_bytes, py::arg("ranks"), py::arg("owner"), py::arg("element_bytes"))
      .def("scales_at", &ParameterFacts::scales_at, py::arg("shard"))
      .def("stored_bytes", &ParameterFacts::stored_bytes, py::arg("ranks"))
      .def("held_bytes", &ParameterFacts::held_bytes, py::arg("ranks"), py::arg("owner"), py::arg("element_bytes"));
  py::class_<OperationFacts>(m, "OperationFacts", "One use of an operation: its parameters in the order of the engine.")
      .def(py::init([](const std::string& key, std::vector<ParameterFacts> parameters, bool input_gradient) {
             return OperationFacts{operation_kind(key), std::move(parameters), input_gradient};
           }),
           py::arg("key"), py::arg("parameters"), py::arg("input_gradient") = true)
      .def_readonly("kind", &OperationFacts::kind)
      .def("travels", &OperationFacts::travels, py::arg("parameter"), py::arg("pass_"))
      .def("takes_groups", &OperationFacts::takes_groups, py::arg("pass_"))
      .def(
          "chunks",
          [](const OperationFacts& operation, int ranks, int64_t element_bytes, int64_t cap) {
            const Chunks chunks = operation.chunks(ranks, element_bytes, cap);
            return std::pair(chunks.count, chunks.rows);
          },
          py::arg("ranks"), py::arg("element_bytes"), py::arg("cap"), "How many, and the rows of the largest.");
  Fields<StepSize> step("footprint");
  step.required("ranks", &StepSize::ranks)
      .required("in_place", &StepSize::in_place)
      .required("sends_anywhere", [](StepSize& size) -> bool& { return size.movement.sends_anywhere; })
      .required("receives_anywhere", [](StepSize& size) -> bool& { return size.movement.receives_anywhere; })
      .required("cast", [](StepSize& size) -> bool& { return size.movement.cast; })
      .required("compute_bytes", &StepSize::compute_bytes)
      .required("reduce_bytes", &StepSize::reduce_bytes)
      .required("slot_cap", &StepSize::slot_cap)
      .optional("late", &StepSize::late)
      .optional("prefetch", &StepSize::prefetch)
      .optional("look_ahead", &StepSize::look_ahead)
      .optional("route", &StepSize::route)
      .optional("group", &StepSize::group)
      .optional("hosts", &StepSize::hosts)
      .optional("gradient_route", &StepSize::gradient_route)
      .optional("sum_bytes", &StepSize::sum_bytes)
      .optional("gradients_quantized", &StepSize::gradients_quantized)
      .optional("gradients_apart", &StepSize::gradients_apart)
      .optional("travel", &StepSize::travel)
      .optional("halves", &StepSize::halves)
      .optional("collective", &StepSize::collective);
  m.def(
      "footprint",
      [step](const std::vector<OperationFacts>& operations, const py::kwargs& size) {
        return footprint(operations, step.make(size));
      },
      py::arg("operations"));
  m.def(
      "traffic",
      [step](const OperationFacts& operation, int rank, const py::kwargs& size) {
        std::vector<std::tuple<int64_t, int64_t, int64_t>> found;
        for (const Sent& sent : traffic(operation, step.make(size), rank)) {
          found.emplace_back(sent.forward, sent.backward, sent.gradient);
        }
        return found;
      },
      py::arg("operation"), py::arg("rank"),
      "Bytes of each parameter that a rank sends in a step: weights forward, weights backward, gradients.");
  m.def("aligned", &aligned, py::arg("bytes"), "The bytes that a tensor of so many takes in a slot.");
  m.def("travel_bytes", &travel_bytes, py::arg("numbers"), py::arg("travel"), py::arg("compute_bytes"));
  m.def(
      "travels_in_place",
      [](bool cast, bool sends_anywhere, bool receives_anywhere) {
        return Movement{cast, sends_anywhere, receives_anywhere}.in_place();
      },
      py::arg("cast"), py::arg("sends_anywhere"), py::arg("receives_anywhere"));
  m.def(
      "block_layout",
      [](BlockFormat format) {
        const BlockLayout layout = block_layout(format);
        return std::pair(layout.numbers, layout.bytes);
      },
      py::arg("format"));
  m.def("rows_of_blocks", &rows_of_blocks, py::arg("format"), py::arg("row_numbers"));
  m.attr("slot_cap") = kSlotCap;
  m.def("shard_size", &shard_size, py::arg("extent"), py::arg("ranks"), py::arg("owner"));
  m.def("shard_sizes", &shard_sizes, py::arg("extent"), py::arg("ranks"));
  py::list tiles;
  for (const Tile& tile : kTiles) tiles.append(py::make_tuple(tile.rows, tile.columns));
  m.attr("gemm_tiles") = py::tuple(tiles);
  m.def(
      "waves",
      [](int64_t rows, int64_t columns, int multiprocessors, size_t tile, int64_t batch) {
        RTP_CHECK_VALUE(tile < std::size(kTiles), "waves: expected a tile below ", std::size(kTiles), ", got ", tile);
        return waves(rows, columns, multiprocessors, kTiles[tile], batch);
      },
      py::arg("rows"), py::arg("columns"), py::arg("multiprocessors"), py::arg("tile") = 0, py::arg("batch") = 1);
  m.def("wave_efficiency", &wave_efficiency, py::arg("rows"), py::arg("columns"), py::arg("multiprocessors"));
  m.def("wastes_last_wave", &wastes_last_wave, py::arg("rows"), py::arg("columns"), py::arg("multiprocessors"));
}

}  // namespace rtp
