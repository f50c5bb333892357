#include "schedule/footprint.h"

#include <iterator>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "python/fields.h"
#include "python/rules.h"
#include "schedule/waves.h"

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
  py::class_<OperationSize>(m, "OperationSize", "One rotated operation in numbers: its largest shard.")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, bool>>& tensors, bool bundle, bool in_chunks,
                       const std::vector<size_t>& biases, bool deferred, const std::map<size_t, BlockFormat>& frozen) {
             OperationSize operation{{}, bundle, in_chunks, biases, deferred};
             for (const auto& [rows, elements, backward] : tensors)
               operation.tensors.push_back({rows, elements, backward});
             for (const auto& [place, format] : frozen) operation.tensors.at(place).frozen = format;
             return operation;
           }),
           py::arg("tensors"), py::arg("bundle"), py::arg("in_chunks"), py::arg("biases") = std::vector<size_t>{},
           py::arg("late") = true, py::arg("frozen") = std::map<size_t, BlockFormat>{},
           "parts: rows, numbers in each, and whether it travels in backward too. biases: the places of those that "
           "never travel in fewer bits. late: whether its gradients may land after its pass. frozen: the formats of "
           "those that are stored in blocks, by "
           "place.")
      .def(
          "chunks",
          [](const OperationSize& operation, int64_t element_bytes, int64_t cap) {
            const Chunks chunks = operation.chunks(element_bytes, cap);
            return std::pair(chunks.count, chunks.rows);
          },
          py::arg("element_bytes"), py::arg("cap"), "How many, and the rows of the largest.");
  Fields<StepSize> step("footprint");
  step.required("ranks", &StepSize::ranks)
      .required("in_place", &StepSize::in_place)
      .required("sends_anywhere", [](StepSize& size) -> bool& { return size.travel.sends_anywhere; })
      .required("receives_anywhere", [](StepSize& size) -> bool& { return size.travel.receives_anywhere; })
      .required("cast", [](StepSize& size) -> bool& { return size.travel.cast; })
      .required("compute_bytes", &StepSize::compute_bytes)
      .required("reduce_bytes", &StepSize::reduce_bytes)
      .required("slot_cap", &StepSize::slot_cap)
      .optional("late", &StepSize::deferred)
      .optional("prefetch", &StepSize::prefetched)
      .optional("route", &StepSize::route)
      .optional("hosts", &StepSize::hosts)
      .optional("gradient_route", &StepSize::gradient_route)
      .optional("sum_bytes", &StepSize::sum_bytes)
      .optional("gradients_quantized", &StepSize::gradients_quantized)
      .optional("travel", &StepSize::wire);
  m.def(
      "footprint",
      [step](const std::vector<OperationSize>& operations, const py::kwargs& size) {
        return footprint(operations, step.make(size));
      },
      py::arg("operations"));
  m.def("aligned", &aligned, py::arg("bytes"), "The bytes that a tensor of so many takes in a slot.");
  m.def("wire_bytes", &wire_bytes, py::arg("numbers"), py::arg("travel"), py::arg("compute_bytes"));
  m.def(
      "travels_in_place",
      [](bool cast, bool sends_anywhere, bool receives_anywhere) {
        return Travel{cast, sends_anywhere, receives_anywhere}.in_place();
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
