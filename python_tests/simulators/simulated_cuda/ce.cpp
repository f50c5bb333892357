// The transport ce and the shards that copy engines copy, their mutants (mutants.py), and the links of the emulated
// ring. Sources and bindings form one translation unit because their headers dominate the compile time.
#include "../../../csrc/transport/ce/ce.cpp"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "../../../csrc/device/copy_engine.cpp"
#include "../../../csrc/engine/shards/copied/copied_shards.cpp"
#include "../../../csrc/engine/shards/copied/offloaded_shards.cpp"
#include "../../../csrc/engine/shards/host_shards.cpp"
#include "../../../csrc/engine/shards/shard_source.cpp"
#include "../../../csrc/transport/ce/peer_flags.cpp"
#include "../../../csrc/transport/ce/peer_memory.cpp"
#include "../../../csrc/transport/emulated/emulated.cpp"
#include "../../../csrc/transport/emulated/links.cpp"
#include "../../../csrc/transport/emulated/wire.cpp"
#include "mutated_copied_shards.h"
#include "mutated_transport_ce.h"

void bind_ce(pybind11::module_& m);

namespace {

using namespace rtp;
using NoGil = py::gil_scoped_release;

CeTransport& ce(Transport& transport) { return dynamic_cast<CeTransport&>(transport); }

CeMode mode(bool pull) { return pull ? CeMode::pull : CeMode::push; }

}  // namespace

void bind_ce(pybind11::module_& m) {
  py::class_<EmulatedLink>(m, "EmulatedLink")
      .def(py::init([](const std::string& name) { return make_emulated_link(name, at::Device(at::kCPU)); }))
      .def("copy", [](EmulatedLink& link, const Stream& stream, const std::vector<at::Tensor>& to,
                      const std::vector<at::Tensor>& from) {
        std::vector<Copy> copies;
        for (size_t i = 0; i < to.size(); ++i) {
          copies.push_back({to[i].data_ptr(), from[i].data_ptr(), static_cast<size_t>(from[i].nbytes())});
        }
        link.copy(Channel::gradient, copies, stream.get());
      });
  m.def("ce_refusal", &ce_refusal);
  m.def(
      "ce",
      [](const std::string& id, int rank, int ranks, std::chrono::milliseconds timeout,
         const std::shared_ptr<PeerStatus>& news, int mutant) -> std::shared_ptr<Transport> {
        const NoGil release;
        const RingEnd end{rank, ranks, at::Device(at::kCPU, 0), timeout, news};
        return mutant < 0 ? make_ce_transport(end, id) : make_mutated_ce_transport(mutant, end, id);
      },
      py::arg("id"), py::arg("rank"), py::arg("ranks"), py::arg("timeout"), py::arg("news"), py::arg("mutant") = -1);
  m.def(
      "ce_level",
      [](const RingEnd& end, const std::string& id, int mutant) -> std::shared_ptr<Transport> {
        const NoGil release;
        return mutant < 0 ? make_ce_transport(end, id) : make_mutated_ce_transport(mutant, end, id);
      },
      py::arg("end"), py::arg("id"), py::arg("mutant") = -1);
  m.def(
      "set_ce_modes",
      [](Transport& transport, bool pull_weights, bool pull_gradients) {
        ce(transport).set_mode(Channel::weight, mode(pull_weights));
        ce(transport).set_mode(Channel::gradient, mode(pull_gradients));
      },
      py::arg("transport"), py::arg("pull_weights"), py::arg("pull_gradients"));
  m.def("emulated", [](const std::string& link) -> std::shared_ptr<Transport> {
    return std::make_shared<EmulatedDevice>(at::Device(at::kCPU, 0), link);
  });
  m.def(
      "copied_shards",
      [](const std::string& id, int rank, int ranks, int64_t bytes, std::chrono::milliseconds timeout, int mutant) {
        const NoGil release;
        const auto make = mutant < 0 ? &make_copied_shards : kCopiedMutants[mutant].copied;
        return make(id, rank, ranks, bytes, at::Device(at::kCPU, 0), timeout);
      },
      py::arg("id"), py::arg("rank"), py::arg("ranks"), py::arg("bytes"), py::arg("timeout"), py::arg("mutant") = -1);
  m.def(
      "offloaded_shards",
      [](int rank, int ranks, int64_t bytes, int mutant) {
        const auto make = mutant < 0 ? &make_offloaded_shards : kCopiedMutants[mutant].offloaded;
        return make(rank, ranks, bytes, at::Device(at::kCPU, 0));
      },
      py::arg("rank"), py::arg("ranks"), py::arg("bytes"), py::arg("mutant") = -1);
  m.def("pinned_regions", [] {
    const std::lock_guard lock(simulated::world().mutex);
    return simulated::world().pinned.size();
  });
  m.def("ce_check", [](Transport& transport) { ce(transport).check(); });
  m.def("ce_raised", [](Transport& transport) { return ce(transport).raised(); });
  m.def("ce_at_rest", [](Transport& transport) { return ce(transport).at_rest(); }, py::call_guard<NoGil>());
}
