#include "schedule/footprint.h"

#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "python/internal.h"
#include "schedule/waves.h"

namespace rtp {

Wire parse_wire(const std::optional<std::string>& travel) {
  if (!travel) return Wire::plain;
  RTP_CHECK_VALUE(*travel == "bfloat16" || *travel == "int8", "expected travel bfloat16, int8 or None, got ", *travel);
  return *travel == "int8" ? Wire::int8 : Wire::bfloat16;
}

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
      .def_readonly("free_gradient", &Footprint::free_gradient);
  py::class_<OperationSize>(m, "OperationSize", "One rotated operation in numbers: its largest shard.")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, bool>>& tensors, bool bundle, bool in_chunks,
                       const std::vector<size_t>& biases, bool deferred) {
             OperationSize operation{{}, bundle, in_chunks, biases, deferred};
             for (const auto& [rows, elements, backward] : tensors)
               operation.tensors.push_back({rows, elements, backward});
             return operation;
           }),
           py::arg("tensors"), py::arg("bundle"), py::arg("in_chunks"), py::arg("biases") = std::vector<size_t>{},
           py::arg("late") = true,
           "parts: rows, numbers in each, and whether it travels in backward too. biases: the places of those that "
           "never travel in fewer bits. late: whether its gradients may land after its pass.")
      .def(
          "chunks",
          [](const OperationSize& operation, int64_t element_bytes, int64_t cap) {
            const Chunks chunks = operation.chunks(element_bytes, cap);
            return std::pair(chunks.count, chunks.rows);
          },
          py::arg("element_bytes"), py::arg("cap"), "How many, and the rows of the largest.");
  m.def(
      "footprint",
      [](const std::vector<OperationSize>& operations, int ranks, bool in_place, bool sends_anywhere,
         bool receives_anywhere, bool cast, int64_t compute_bytes, int64_t reduce_bytes, int64_t slot_cap, int deferred,
         const std::string& route, int hosts, const std::string& gradient_route, int64_t sum_bytes,
         bool gradients_quantized, const std::optional<std::string>& travel) {
        const Travel reach{cast, sends_anywhere, receives_anywhere};
        return footprint(operations, {ranks, reach, in_place, compute_bytes, reduce_bytes, slot_cap, deferred,
                                      parse_route(route), hosts, parse_gradient_route(gradient_route), sum_bytes,
                                      gradients_quantized, parse_wire(travel)});
      },
      py::arg("operations"), py::kw_only(), py::arg("ranks"), py::arg("in_place"), py::arg("sends_anywhere"),
      py::arg("receives_anywhere"), py::arg("cast"), py::arg("compute_bytes"), py::arg("reduce_bytes"),
      py::arg("slot_cap"), py::arg("late") = 0, py::arg("route") = "ring", py::arg("hosts") = 1,
      py::arg("gradient_route") = "chain", py::arg("sum_bytes") = 4, py::arg("gradients_quantized") = false,
      py::arg("travel") = py::none());
  m.def(
      "wire_bytes",
      [](int64_t numbers, const std::optional<std::string>& travel, int64_t compute_bytes) {
        return wire_bytes(numbers, parse_wire(travel), compute_bytes);
      },
      py::arg("numbers"), py::arg("travel"), py::arg("compute_bytes"));
  m.def(
      "travels_in_place",
      [](bool cast, bool sends_anywhere, bool receives_anywhere) {
        return Travel{cast, sends_anywhere, receives_anywhere}.in_place();
      },
      py::arg("cast"), py::arg("sends_anywhere"), py::arg("receives_anywhere"));
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
