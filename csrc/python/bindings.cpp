// The Python bindings of the engine. No file outside this folder includes pybind11.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "base/checks.h"
#include "base/host.h"
#include "base/signals.h"
#include "engine/executor.h"
#include "engine/shards/copied/copied_shards.h"
#include "engine/shards/pulled_shards.h"
#include "engine/shards/shared_shards.h"
#include "engine/shards/two_level_shards.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/scaled_linear.h"
#include "python/fields.h"
#include "python/internal.h"
#include "schedule/schedule.h"
#include "transport/c10d.h"
#include "transport/ce/ce.h"
#include "transport/composite/composite.h"
#include "transport/emulated/emulated.h"
#include "transport/nccl/nccl.h"
#include "transport/nccl/peer_status.h"
#include "transport/peer_state.h"
#include "transport/shm/shm.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace {

using namespace rtp;
using NoGil = py::gil_scoped_release;

class RaisedByHandler : public py::error_already_set, public Interrupted {};

// Python runs handlers on its main thread; another one would only wait for the GIL.
void run_signal_handlers() {
  if (gettid() != getpid()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_Occurred() == nullptr && PyErr_CheckSignals() != 0) throw RaisedByHandler();
}

void bind_errors(py::module_& m) {
  signal_handlers = run_signal_handlers;
  static py::handle base = py::register_exception<RotationError>(m, "RotationError", PyExc_RuntimeError);
  py::register_exception<RingTimeout>(m, "RingTimeout", base);
  py::register_exception<CudaError>(m, "CudaError", base);
  py::register_exception<NcclError>(m, "NcclError", base);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const TypeMismatch& mismatch) {
      PyErr_SetString(PyExc_TypeError, mismatch.what());
    } catch (const c10::IndexError& outside) {
      PyErr_SetString(PyExc_IndexError, outside.what_without_backtrace());
    }
  });
}

#ifdef RTP_WITH_CUDA
void set_ce_mode(Transport& transport, Channel channel, const std::string& mode) {
  auto* composite = dynamic_cast<CompositeTransport*>(&transport);
  auto* ce = dynamic_cast<CeTransport*>(composite != nullptr ? &composite->inner() : &transport);
  RTP_CHECK_VALUE(ce != nullptr, "expected the transport ce, got ", transport.name());
  RTP_CHECK_VALUE(mode == "push" || mode == "pull", "expected a mode of push or pull, got ", mode);
  ce->set_mode(channel, mode == "push" ? CeMode::push : CeMode::pull);
}
#endif

void bind_transports(py::module_& m) {
  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def_property_readonly("name", [](const Transport& t) { return t.name(); })
      .def_property_readonly("has_collectives", &Transport::has_collectives);
  py::class_<ShmTransport, Transport, std::shared_ptr<ShmTransport>>(m, "ShmTransport")
      .def(py::init(&make_shm_transport), py::arg("rank"), py::arg("ranks"), py::arg("timeout"), py::arg("first") = 0)
      .def("address", &ShmTransport::address)
      .def("connect", &ShmTransport::connect, py::arg("addresses"));
  py::class_<TcpTransport, Transport, std::shared_ptr<TcpTransport>>(m, "TcpTransport")
      .def(py::init(&make_tcp_transport), py::arg("rank"), py::arg("ranks"), py::arg("host"), py::arg("timeout"))
      .def("address", &TcpTransport::address)
      .def("connect", &TcpTransport::connect, py::arg("addresses"), py::call_guard<NoGil>());
  m.def("interface_address", &interface_address, py::arg("name"), "The address of a network interface, in numbers.");
  m.def("address_toward", &address_toward, py::arg("host"), py::call_guard<NoGil>(),
        "The address of this host, in numbers, that packets to another one leave from.");
  py::class_<CompositeTransport, Transport, std::shared_ptr<CompositeTransport>>(m, "CompositeTransport")
      .def(py::init(&make_composite_transport), py::arg("inner"), py::arg("outer"), py::arg("rank"),
           py::arg("per_host"))
      .def("bytes_between_hosts", &CompositeTransport::bytes_between_hosts);
  m.def("c10d_transport", &make_c10d_transport, py::arg("weight_group"), py::arg("gradient_group"), py::arg("device"),
        py::arg("timeout"));
  m.def("emulated_transport", &make_emulated_transport, py::arg("device"), py::arg("link") = py::none());
  py::class_<PeerStatus, std::shared_ptr<PeerStatus>>(m, "PeerStatus", "Failure notices between the ranks of one host.")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("ranks"))
      .def("address", &PeerStatus::address)
      .def("connect", &PeerStatus::connect, py::arg("addresses"));
#ifdef RTP_WITH_CUDA
  m.attr("with_cuda") = true;
  py::class_<RingEnd>(m, "RingEnd", "A rank of a ring over CUDA devices.")
      .def(
          py::init([](int rank, int ranks, at::Device device, std::chrono::milliseconds timeout,
                      const std::shared_ptr<PeerStatus>& news) { return RingEnd{rank, ranks, device, timeout, news}; }),
          py::arg("rank"), py::arg("ranks"), py::arg("device"), py::arg("timeout"), py::arg("news"))
      .def("levels", &levels_of, py::arg("per_host"),
           "The ends of the rank's two transports: inside its host, and between hosts.");
  Fields<NcclOptions>("NcclOptions")
      .required("min_ctas", [](NcclOptions& options) -> int& { return options.communicators.min_ctas; })
      .required("max_ctas", [](NcclOptions& options) -> int& { return options.communicators.max_ctas; })
      .required("blocking", [](NcclOptions& options) -> bool& { return options.communicators.blocking; })
      .optional("registered", &NcclOptions::registered)
      .bind(m);
  m.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });
  m.def("nccl_loaded_version", &nccl_loaded_version);
  m.def("nccl_compiled_version", &nccl_compiled_version);
  m.def(
      "nccl_transport",
      [](const std::vector<std::string>& ids, const RingEnd& end, const NcclOptions& options) {
        const NoGil release;
        return make_nccl_transport(end, ids, options);
      },
      py::arg("ids"), py::arg("end"), py::arg("options"));
  m.def("ce_refusal", &ce_refusal);
  m.def(
      "ce_transport",
      [](const std::string& id, const RingEnd& end) -> std::shared_ptr<Transport> {
        const NoGil release;
        return make_ce_transport(end, id);
      },
      py::arg("id"), py::arg("end"));
  m.def("set_ce_mode", &set_ce_mode, py::arg("transport"), py::arg("channel"), py::arg("mode"));
#else
  m.attr("with_cuda") = false;
#endif
}

// For each tensor that travels, the shapes of all owners' shards.
using Shapes = std::vector<std::vector<std::vector<int64_t>>>;

ShardBundle make_bundle(const std::vector<at::Tensor>& local, const Shapes& shapes,
                        std::optional<at::ScalarType> dtype = std::nullopt) {
  RTP_CHECK_VALUE(!local.empty() && local.size() == shapes.size(), "expected shapes for ", local.size(),
                  " tensors, got ", shapes.size());
  ShardBundle bundle;
  for (size_t index = 0; index < local.size(); ++index) {
    bundle.layouts.push_back({dtype.value_or(local[index].scalar_type()), shapes[index]});
    bundle.local.push_back(local[index]);
  }
  return bundle;
}

ShardBundle weight_bundle(const Executor& executor, const std::vector<at::Tensor>& local, const Shapes& shapes,
                          const RotationOptions& options) {
  ShardBundle bundle = make_bundle(local, shapes, options.compute_dtype);
  return travelling_weights(executor, options, std::move(bundle.layouts), std::move(bundle.local));
}

void bind_executor(py::module_& m) {
  py::class_<ShardSource, std::shared_ptr<ShardSource>>(m, "ShardSource", "Where forwards get shards without hops.")
      .def("memory", &ShardSource::memory, py::arg("offset"), py::arg("bytes"))
      .def("address", &ShardSource::address)
      .def("connect", &ShardSource::connect, py::arg("addresses"), py::arg("bytes"), py::arg("offsets"),
           py::call_guard<NoGil>())
      .def("close", &ShardSource::close, py::call_guard<NoGil>())
      .def_property_readonly("pulled_bytes", &ShardSource::pulled_bytes)
      .def_property_readonly("shared_bytes", &ShardSource::shared_bytes);
  m.def("shared_shards", [](int rank, int ranks, int64_t bytes) -> std::shared_ptr<ShardSource> {
    return std::make_shared<SharedShards>(rank, ranks, bytes);
  });
  m.def("pulled_shards",
        [](int rank, int ranks, int64_t bytes, const std::string& host, std::chrono::milliseconds timeout)
            -> std::shared_ptr<ShardSource> { return make_owned<PulledShards>(rank, ranks, bytes, host, timeout); });
  m.def("two_level_shards",
        [](int rank, int ranks, int64_t bytes, const std::string& host, std::chrono::milliseconds timeout, int hosts,
           int64_t most, int64_t parameters) -> std::shared_ptr<ShardSource> {
          return make_owned<TwoLevelShards>(rank, ranks, bytes, host, timeout, hosts, most, parameters);
        });
#ifdef RTP_WITH_CUDA
  m.def("copied_shards", &make_copied_shards, py::call_guard<NoGil>());
  m.def("offloaded_shards", &make_offloaded_shards, py::call_guard<NoGil>());
#endif
  ExecutorClass executor(m, "Executor", "The transport and the slots of one ring.");
  executor
      .def(py::init<std::shared_ptr<Transport>, int, int, at::Device, int>(), py::arg("transport"), py::arg("rank"),
           py::arg("ranks"), py::arg("device"), py::arg("hosts") = 1)
      .def_property_readonly("alive", &Executor::alive)
      .def("check_alive", &Executor::check_alive, py::arg("operation"))
      .def("fail", &Executor::fail, py::arg("reason"), py::call_guard<NoGil>())
      .def("close", &Executor::close, py::call_guard<NoGil>())
      .def("slots", [](Executor& e, Channel channel) { return e.pool().count(channel); })
      .def("scratch", [](Executor& e) { return e.pool().scratch_count(); })
      .def(
          "forget_codes", [](Executor& e, const at::Tensor& shard) { e.codes().forget(shard); }, py::arg("shard"))
      .def(
          "set_amax",
          [](Executor& e, const at::Tensor& shard, float amax, std::optional<int64_t> version, int64_t phase) {
            e.codes().set_amax(shard, amax, version, phase);
          },
          py::arg("shard"), py::arg("amax"), py::arg("version"), py::arg("phase"))
      .def(
          "has_amax",
          [](Executor& e, const at::Tensor& shard, int64_t phase) { return e.codes().has_amax(shard, phase); },
          py::arg("shard"), py::arg("phase"))
      .def(
          "codes", [](Executor& e) { return std::pair(e.codes().bytes(), e.codes().made()); },
          "Bytes of the codes of local shards, and how often codes were made.")
      .def(
          "enter",
          [](Executor& e, int64_t phase, bool backward, int64_t serial, const std::vector<at::Tensor>& watched) {
            Context context{phase, backward, serial, {}};
            for (const at::Tensor& tensor : watched) {
              // an inference tensor has no counter, but keeps its place
              context.watched.push_back(tensor.is_inference() ? c10::VariableVersion(0)
                                                              : tensor.unsafeGetTensorImpl()->version_counter());
            }
            e.enter(std::move(context));
          },
          py::arg("phase"), py::arg("backward"), py::arg("serial"), py::arg("watched"), py::call_guard<NoGil>())
      .def(
          "prefetch",
          [](Executor& e, bool on, std::optional<int64_t> bytes, bool keeps) {
            e.prefetcher().allow(on && e.ranks() > 1, bytes, keeps);
          },
          py::arg("on"), py::arg("bytes") = 0, py::arg("keeps") = false,
          "Whether hops of weights are posted ahead, and of how many bytes beyond slots that are left; None: what the "
          "largest pass receives. keeps: whether a forward that is computed again keeps its weights for its backward.")
      .def(
          "allow_late", [](Executor& e, size_t passes) { e.late_gradients().allow(passes); }, py::arg("passes"),
          "Maximum number of gradient reductions that may finish after their pass.")
      .def("land", &Executor::land, py::arg("gradient"), py::call_guard<NoGil>())
      .def("landed_late", [](Executor& e) { return e.late_gradients().finished(); })
      .def("prefetched",
           [](Executor& e) {
             return std::pair(e.prefetcher().sent() + e.pulls().started_ahead(),
                              e.prefetcher().used() + e.pulls().used_ahead());
           })
      .def(
          "set_delay", [](Executor& e, std::chrono::microseconds most) { e.hops().set_delay(most); }, py::arg("most"))
      .def("take_from", &Executor::take_from, py::arg("source"), py::call_guard<NoGil>())
      .def(
          "end_forward", [](Executor& e) { e.pulls().end_forward(); }, py::call_guard<NoGil>())
      .def("schedules", &Executor::schedules, "Number of cached schedules.")
      .def("reset_peak", [](Executor& e) { e.pool().reset_peak(); })
      .def("clear_slots", &Executor::clear_slots, py::call_guard<NoGil>())
      .def("hops", [](Executor& e, Channel channel) { return e.hops().count(channel); })
      .def("bytes_sent", [](Executor& e, Channel channel) { return e.hops().bytes_sent(channel); });
  bind_sink(m, executor), bind_graphs(m, executor);
  py::class_<Execution>(m, "Execution", "One pass driven from Python: rotate and collect.")
      .def_static(
          "rotate",
          [](Executor& executor, const std::vector<at::Tensor>& local, const Shapes& shapes, Route route,
             bool reverse) {
            ScheduleOptions options;
            options.pass = reverse ? Pass::backward : Pass::forward;
            options.wgrad = false;
            options.route = route;
            return std::make_unique<Execution>(executor, executor.schedule(options), make_bundle(local, shapes),
                                               std::nullopt, "rotate");
          },
          py::arg("executor"), py::arg("local"), py::arg("shapes"), py::arg("route"), py::arg("reverse"),
          py::keep_alive<0, 1>(), py::call_guard<NoGil>())
      .def_static(
          "collect",
          [](Executor& executor, const std::vector<at::Tensor>& local, const Shapes& shapes, Route route) {
            ScheduleOptions options;
            options.pass = Pass::backward;
            options.dgrad = false;
            options.route = route;
            options.receive_in_slots = !executor.transport().receives_anywhere();
            return std::make_unique<Execution>(executor, executor.schedule(options), std::nullopt,
                                               make_bundle(local, shapes), "collect");
          },
          py::arg("executor"), py::arg("local"), py::arg("shapes"), py::arg("route") = Route::ring,
          py::keep_alive<0, 1>(), py::call_guard<NoGil>())
      .def_static(
          "forward",
          [](Executor& executor, const std::vector<at::Tensor>& weights, const Shapes& shapes,
             const RotationOptions& options) {
            ShardBundle bundle = weight_bundle(executor, weights, shapes, options);
            const Schedule& schedule = forward_schedule(executor, options, bundle);
            return std::make_unique<Execution>(executor, schedule, std::move(bundle), std::nullopt,
                                               options.name + " forward");
          },
          py::arg("executor"), py::arg("weights"), py::arg("shapes"), py::arg("options"), py::keep_alive<0, 1>(),
          py::call_guard<NoGil>())
      .def_static(
          "backward",
          [](Executor& executor, const std::vector<at::Tensor>& weights, const Shapes& shapes,
             const std::vector<at::Tensor>& gradients, const Shapes& gradient_shapes, const RotationOptions& options,
             bool dgrad, bool bundle, bool halves) {
            std::optional<ShardBundle> weight, gradient;
            if (!weights.empty()) weight = weight_bundle(executor, weights, shapes, options);
            if (!gradients.empty()) gradient = travelling_gradients(make_bundle(gradients, gradient_shapes), options);
            const Schedule& schedule =
                backward_schedule(executor, options, weight, {dgrad, gradient.has_value(), bundle, halves});
            return std::make_unique<Execution>(executor, schedule, std::move(weight), std::move(gradient),
                                               options.name + " backward");
          },
          py::arg("executor"), py::arg("weights"), py::arg("shapes"), py::arg("gradients"), py::arg("gradient_shapes"),
          py::arg("options"), py::arg("dgrad"), py::arg("bundle"), py::arg("halves") = false, py::keep_alive<0, 1>(),
          py::call_guard<NoGil>())
      .def(
          "next",
          [](Execution& pass) -> std::optional<Step> {
            const Step* step = pass.next();
            return step == nullptr ? std::nullopt : std::optional<Step>(*step);
          },
          py::call_guard<NoGil>())
      .def("finish", &Execution::finish, py::call_guard<NoGil>())
      .def("weight", &Execution::weight)
      .def("gradient_in", &Execution::gradient_in)
      .def("gradient_out", &Execution::gradient_out);
}

void bind_operations(py::module_& m) {
  Fields<RotationOptions>("RotationOptions")
      .required("name", &RotationOptions::name)
      .required("route", &RotationOptions::route)
      .optional("group", &RotationOptions::group)
      .required("in_place", &RotationOptions::in_place)
      .required("compute_dtype", &RotationOptions::compute_dtype)
      .required("reduce_dtype", &RotationOptions::reduce_dtype)
      .required("slot_cap", &RotationOptions::slot_cap)
      .required("halves", &RotationOptions::halves)
      .optional("late", &RotationOptions::late)
      .optional("travel", &RotationOptions::travel)
      .optional("gradient_route", &RotationOptions::gradient_route)
      .optional("gradients_quantized", &RotationOptions::gradients_quantized)
      .optional("gradients_apart", &RotationOptions::gradients_apart)
      .optional("collective", &RotationOptions::collective)
      .bind(m)
      .def_property_readonly("local_dtype", &RotationOptions::local_dtype);
  py::class_<LinearShape>(m, "LinearShape")
      .def(py::init([](int64_t out_features, int64_t in_features, bool by_outputs, bool transposed,
                       const std::optional<BlockFormat>& frozen, bool in_mlp, const std::optional<CodePlanes>& codes) {
             return LinearShape{out_features, in_features, by_outputs, transposed, frozen, in_mlp, codes};
           }),
           py::arg("out_features"), py::arg("in_features"), py::arg("by_outputs"), py::arg("transposed"),
           py::arg("frozen") = std::nullopt, py::arg("in_mlp") = false, py::arg("codes") = std::nullopt);
  py::class_<LinearBundle>(m, "LinearBundle")
      .def(py::init([](const std::vector<LinearShape>& shapes, const std::vector<bool>& biased) {
             return LinearBundle{shapes, biased};
           }),
           py::arg("shapes"), py::arg("biased"));
  py::class_<Projection>(m, "Projection")
      .def(py::init([](int64_t input, int64_t layer, int64_t begin, int64_t end) {
             return Projection{input, layer, begin, end};
           }),
           py::arg("input"), py::arg("layer"), py::arg("begin"), py::arg("end"));
  m.def("linear_forward", &linear_forward, py::arg("executor"), py::arg("inputs"), py::arg("parameters"),
        py::arg("bundle"), py::arg("projections"), py::arg("options"), py::call_guard<OperationScope>());
  m.def(
      "linear_backward",
      [](Executor& executor, const std::vector<std::optional<at::Tensor>>& dys, const std::vector<at::Tensor>& inputs,
         const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
         const std::vector<Projection>& projections, const std::vector<bool>& needs_input,
         const std::vector<bool>& needs_parameter, const RotationOptions& options) {
        std::vector<at::Tensor> defined;
        for (const auto& dy : dys) defined.push_back(dy.value_or(at::Tensor()));
        return linear_backward(executor, defined, inputs, parameters, bundle, projections, needs_input, needs_parameter,
                               options);
      },
      py::arg("executor"), py::arg("dys"), py::arg("inputs"), py::arg("parameters"), py::arg("bundle"),
      py::arg("projections"), py::arg("needs_input"), py::arg("needs_parameter"), py::arg("options"),
      py::call_guard<OperationScope>());
  Fields<ScaledOperands>("ScaledOperands")
      .required("tokens", &ScaledOperands::tokens)
      .required("gradients", &ScaledOperands::gradients)
      .required("weight_gradients", &ScaledOperands::weight_gradients)
      .required("rows", &ScaledOperands::rows)
      .bind(m);
  m.def("scaled_linear_forward", &scaled_linear_forward, py::arg("executor"), py::arg("x"), py::arg("parameters"),
        py::arg("bundle"), py::arg("operands"), py::arg("options"), py::call_guard<OperationScope>());
  m.def(
      "scaled_linear_backward",
      [](Executor& executor, const std::vector<std::optional<at::Tensor>>& dys, const at::Tensor& x,
         const std::vector<at::Tensor>& parameters, const LinearBundle& bundle, const ScaledOperands& operands,
         bool needs_x, const std::vector<bool>& needs_parameter, const RotationOptions& options) {
        std::vector<at::Tensor> defined;
        for (const auto& dy : dys) defined.push_back(dy.value_or(at::Tensor()));
        return scaled_linear_backward(executor, defined, x, parameters, bundle, operands, needs_x, needs_parameter,
                                      options);
      },
      py::arg("executor"), py::arg("dys"), py::arg("x"), py::arg("parameters"), py::arg("bundle"), py::arg("operands"),
      py::arg("needs_x"), py::arg("needs_parameter"), py::arg("options"), py::call_guard<OperationScope>());
  m.def("partial_linear_forward", &partial_linear_forward, py::arg("executor"), py::arg("x"), py::arg("weight"),
        py::arg("bias"), py::arg("shape"), py::arg("options"), py::call_guard<OperationScope>());
  m.def(
      "partial_linear_backward",
      [](Executor& executor, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
         const LinearShape& shape, std::tuple<bool, bool, bool> needs, const RotationOptions& options) {
        return partial_linear_backward(executor, dy, x, weight, shape,
                                       {std::get<0>(needs), std::get<1>(needs), std::get<2>(needs)}, options);
      },
      py::arg("executor"), py::arg("dy"), py::arg("x"), py::arg("weight"), py::arg("shape"), py::arg("needs"),
      py::arg("options"), py::call_guard<OperationScope>());
  m.def(
      "embedding_forward",
      [](Executor& executor, const at::Tensor& ids, const at::Tensor& weight, std::tuple<int64_t, int64_t> shape,
         int64_t shard_dim, const RotationOptions& options) {
        return embedding_forward(executor, ids, weight, {std::get<0>(shape), std::get<1>(shape), shard_dim, -1},
                                 options);
      },
      py::arg("executor"), py::arg("ids"), py::arg("weight"), py::arg("shape"), py::arg("shard_dim"),
      py::arg("options"), py::call_guard<OperationScope>());
  m.def(
      "embedding_backward",
      [](Executor& executor, const at::Tensor& dy, const at::Tensor& ids, std::tuple<int64_t, int64_t> shape,
         int64_t shard_dim, int64_t padding_idx, const RotationOptions& options) {
        return embedding_backward(executor, dy, ids, {std::get<0>(shape), std::get<1>(shape), shard_dim, padding_idx},
                                  options);
      },
      py::arg("executor"), py::arg("dy"), py::arg("ids"), py::arg("shape"), py::arg("shard_dim"),
      py::arg("padding_idx"), py::arg("options"), py::call_guard<OperationScope>());
}

}  // namespace

// Shares the version counter, so that autograd detects writes to either tensor if the other one was saved for backward.
void share_version(const at::Tensor& tensor, const at::Tensor& with) {
  if (tensor.is_inference() || with.is_inference()) return;  // inference tensors have no version counter
  tensor.unsafeGetTensorImpl()->set_version_counter(with.unsafeGetTensorImpl()->version_counter());
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The rotation engine of rtp_ext.";
  m.attr("compiled_torch") = RTP_TORCH_VERSION;
  m.attr("ring_closed") = why_lost(PeerState::closed);
  m.attr("process_ended") = why_lost(PeerState::gone);
  py::module_::import("rtp_ext._R");  // has the classes of schedules, which passes return
  bind_errors(m);
  m.def("host_id", &host_id, "Equal on two processes only if they share a host.");
  m.def("processes_id", &processes_id, "Equal on two processes of a host only if they share process ids.");
  bind_transports(m);
  bind_executor(m);
  bind_operations(m);
  bind_bundles(m);
  bind_kernels(m);
  bind_delivered(m);
  m.def("share_version", &share_version, py::arg("tensor"), py::arg("with"));
}
