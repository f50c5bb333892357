// The simulated transports and the controls of the simulation, for the tests.
#include <cuda.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "nccl/simulated_nccl.h"
#include "transport/nccl/nccl.h"
#include "wrapped_transports.h"

void bind_blas(pybind11::module_& m);  // blas.cpp
void bind_ce(pybind11::module_& m);    // ce.cpp

namespace {

using namespace rtp;
using simulated::CountedTransport, simulated::Tally, simulated::WithoutWait;
using NoGil = py::gil_scoped_release;

using Milliseconds = std::chrono::milliseconds;

using News = std::shared_ptr<PeerStatus>;

RingEnd ring_end(int rank, int ranks, Milliseconds timeout, const News& news) {
  return {rank, ranks, at::Device(at::kCPU, 0), timeout, news};
}

void bind_controls(py::module_& m) {
  using simulated::Controls, simulated::Forgotten;
  py::enum_<Forgotten>(m, "Forgotten")
      .value("nothing", Forgotten::nothing)
      .value("waits_of_computes", Forgotten::waits_of_computes)
      .value("waits_of_hops", Forgotten::waits_of_hops)
      .value("ends_of_computes", Forgotten::ends_of_computes)
      .value("ends_of_hops", Forgotten::ends_of_hops);
  py::class_<Controls>(m, "Controls")
      .def_readwrite("delay_us", &Controls::delay_us)
      .def_readwrite("launch_queue", &Controls::launch_queue)
      .def_readwrite("version", &Controls::version)
      .def_readwrite("null_windows", &Controls::null_windows)
      .def_readwrite("capturing", &Controls::capturing)
      .def_readwrite("released", &Controls::released)
      .def_readwrite("lacks_epilogues", &Controls::lacks_epilogues)
      .def_readwrite("lacks_products", &Controls::lacks_products)
      .def_readwrite("refuses_products", &Controls::refuses_products)
      .def_readwrite("lacks_memory_ops", &Controls::lacks_memory_ops)
      .def_readwrite("multiprocessors", &Controls::multiprocessors)
      .def_readwrite("first_device", &Controls::first_device)
      .def_readwrite("lacks_graph_memory", &Controls::lacks_graph_memory)
      .def_readwrite("first_contact", &Controls::first_contact)
      .def_readwrite("serial_launches", &Controls::serial_launches)
      .def_readwrite("full_queue", &Controls::full_queue)
      .def_readwrite("forgotten", &Controls::forgotten);
  m.attr("controls") = py::cast(&simulated::world().controls, py::return_value_policy::reference);
  m.def("reset", [](unsigned int seed) {
    simulated::forget_communicators();
    cudaGetLastError();  // clears the error of an earlier test on this thread
    const std::lock_guard lock(simulated::world().mutex);
    simulated::world().controls = Controls{};
    simulated::world().random.seed(seed);
    simulated::world().mistakes.clear();
    simulated::world().contexts.clear();
    simulated::world().loaded.clear();
  });
  m.def("contexts", [] {
    const std::lock_guard lock(simulated::world().mutex);
    return simulated::world().contexts;
  });
  m.def("calls", [] { return simulated::calls(); });  // calls of this thread, by function
  m.def("mistakes", [] {
    const std::lock_guard lock(simulated::world().mutex);
    return simulated::world().mistakes;
  });
  m.def("threads", [] {
    const std::lock_guard lock(simulated::world().mutex);
    return simulated::world().threads;
  });
  m.def("inject_error", [](int rank, int index, int code) {
    simulated::inject_error(simulated::communicators_of(rank).at(index), static_cast<ncclResult_t>(code));
  });
}

std::byte* address(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

// Kernels on the calling thread's compute stream, for asynchronous computes.
void bind_kernels(py::module_& m) {
  m.def("set_compute", &simulated::set_compute, py::arg("asynchronous"));
  m.def("synchronize", [] { simulated::synchronize(simulated::compute_stream()); }, py::call_guard<NoGil>());
  m.def("launch_copy", [](const at::Tensor& to, const at::Tensor& from) {
    simulated::check_launch();
    simulated::enqueue(simulated::compute_stream(), [to = address(to), from = address(from), bytes = from.nbytes()] {
      simulated::copy(to, from, bytes);
    });
  });
  m.def("launch", [](py::function work) {  // runs a Python function as a kernel
    const std::shared_ptr<py::function> held(new py::function(std::move(work)), [](py::function* last) {
      const py::gil_scoped_acquire lock;
      delete last;
    });
    simulated::check_launch();
    simulated::enqueue(simulated::compute_stream(), [held] {
      try {
        const py::gil_scoped_acquire lock;
        (*held)();
      } catch (const std::exception& error) {
        const std::string said = error.what();
        const std::lock_guard lock(simulated::world().mutex);
        simulated::mistake("a kernel raised " + said);
      }
    });
  });
  m.def("launch_endless", [] {  // runs until everything is released
    simulated::enqueue(simulated::compute_stream(), [] {
      std::unique_lock lock(simulated::world().mutex);
      simulated::wait_until(lock, [] { return false; });
    });
  });
  m.def("launch_add", [](const at::Tensor& to, const at::Tensor& from) {
    simulated::check_launch();  // float64
    simulated::enqueue(simulated::compute_stream(),
                       [to = to.data_ptr<double>(), from = from.data_ptr<double>(), count = from.numel()] {
                         for (int64_t i = 0; i < count; ++i) to[i] += from[i];
                       });
  });
}

// Calls cuStreamWaitValue32 or cuStreamWriteValue32, found as transports find them.
void memory_operation(const char* name, const Stream& stream, const at::Tensor& flag, uint32_t value) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  RTP_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
  RTP_ASSERT(result == cudaDriverEntryPointSuccess, name, " was not found");
  const auto function = reinterpret_cast<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int)>(found);
  RTP_ASSERT(function(stream.get(), reinterpret_cast<CUdeviceptr>(flag.data_ptr()), value, 0) == CUDA_SUCCESS, name);
}

// Streams and events, for tests of the simulation itself.
void bind_runtime(py::module_& m) {
  py::class_<Stream>(m, "Stream")
      .def(py::init(&Stream::highest_priority))
      .def(
          "synchronize", [](const Stream& s) { simulated::synchronize(s.get()); }, py::call_guard<NoGil>())
      .def("idle", &Stream::idle)
      .def("query", [](const Stream& s) { return cudaStreamQuery(s.get()) == cudaSuccess; })
      .def_property_readonly("waits",  // whether the stream waits for a value now
                             [](const Stream& s) {
                               const std::lock_guard lock(simulated::world().mutex);
                               return s.get()->waiting;
                             })
      .def("copy",
           [](const Stream& s, const at::Tensor& to, const at::Tensor& from) {
             RTP_CUDA_CHECK(
                 cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), from.nbytes(), cudaMemcpyDeviceToDevice, s.get()));
           })
      .def("wait", [](const Stream& s, const Event& event) { event.block(s.get()); })
      .def("wait_value", [](const Stream& s, const at::Tensor& flag,
                            uint32_t value) { memory_operation("cuStreamWaitValue32", s, flag, value); })
      .def("write_value", [](const Stream& s, const at::Tensor& flag, uint32_t value) {
        memory_operation("cuStreamWriteValue32", s, flag, value);
      });
  py::class_<Event>(m, "Event")
      .def(py::init<>())
      .def("record", [](Event& event, const Stream& s) { event.record(s.get()); })
      .def("reached", &Event::reached);
}

// Graphs, for tests of the simulation itself.
struct CapturedGraph {
  cudaGraphExec_t executable = nullptr;

  ~CapturedGraph() { cudaGraphExecDestroy(executable); }
};

void bind_graphs(py::module_& m) {
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "CapturedGraph")
      .def("launch",
           [](CapturedGraph& graph, const Stream& s) { RTP_CUDA_CHECK(cudaGraphLaunch(graph.executable, s.get())); });
  // Captures of the calling thread's compute stream, as users of a ring start them, and calls that are forbidden
  // meanwhile.
  m.def("begin_capture",
        [] { RTP_CUDA_CHECK(cudaStreamBeginCapture(simulated::compute_stream(), cudaStreamCaptureModeThreadLocal)); });
  m.def("device_synchronize", [] { RTP_CUDA_CHECK(cudaDeviceSynchronize()); }, py::call_guard<NoGil>());
  const auto end_capture = [](cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    RTP_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    auto made = std::make_shared<CapturedGraph>();
    RTP_CUDA_CHECK(cudaGraphInstantiate(&made->executable, graph, 0));
    cudaGraphDestroy(graph);
    return made;
  };
  m.def("end_capture", [=] { return end_capture(simulated::compute_stream()); });
  m.def("begin_capture",
        [](const Stream& s) { RTP_CUDA_CHECK(cudaStreamBeginCapture(s.get(), cudaStreamCaptureModeThreadLocal)); });
  m.def("end_capture", [=](const Stream& s) { return end_capture(s.get()); });
}

// Communicators, as transports create them.
void bind_communicators(py::module_& m) {
  py::class_<NcclCommunicators>(m, "Communicators")
      .def(py::init([](const std::vector<std::string>& ids, int rank, int ranks, Milliseconds timeout) {
        const NoGil released;  // reacquired before the result is converted to Python
        return std::make_unique<NcclCommunicators>(ids, rank, ranks, at::Device(at::kCPU, 0), CommunicatorOptions{},
                                                   timeout);
      }))
      .def("send",
           [](NcclCommunicators& comms, size_t index, const Stream& stream, const at::Tensor& data, int peer) {
             comms.call(index, "send", [&](ncclComm_t comm) {
               RTP_NCCL_CHECK(ncclSend(data.data_ptr(), data.nbytes(), ncclInt8, peer, comm, stream.get()));
             });
           })
      .def("receive",
           [](NcclCommunicators& comms, size_t index, const Stream& stream, const at::Tensor& data, int peer) {
             comms.call(index, "receive", [&](ncclComm_t comm) {
               RTP_NCCL_CHECK(ncclRecv(data.data_ptr(), data.nbytes(), ncclInt8, peer, comm, stream.get()));
             });
           })
      .def("asynchronous_error", &NcclCommunicators::asynchronous_error)
      .def("abort", &NcclCommunicators::abort)
      .def("finalize", &NcclCommunicators::finalize, py::call_guard<NoGil>());
}

void bind_transports(py::module_& m) {
  m.def("without_wait", [](std::shared_ptr<Transport> inner, const std::string& missing) -> std::shared_ptr<Transport> {
    return std::make_shared<WithoutWait>(std::move(inner), missing);
  });
  py::class_<Tally, std::shared_ptr<Tally>>(m, "Tally")
      .def(py::init())
      .def_readonly("hops", &Tally::hops)
      .def_readonly("cuda", &Tally::cuda)
      .def_readonly("nccl", &Tally::nccl);
  m.def(
      "counted",
      [](std::shared_ptr<Transport> inner, const std::shared_ptr<Tally>& tally, const Transport* beside)
          -> std::shared_ptr<Transport> { return std::make_shared<CountedTransport>(std::move(inner), tally, beside); },
      py::arg("inner"), py::arg("tally"), py::arg("beside") = nullptr);
  m.def("unique_id", [] { return py::bytes(nccl_unique_id()); });
  m.def(
      "nccl",
      [](const std::vector<std::string>& ids, int rank, int ranks, Milliseconds timeout, const News& news,
         bool registered, bool blocking, int max_ctas) {
        const NoGil release;
        NcclOptions options;
        options.communicators.max_ctas = max_ctas;
        options.registered = registered;
        options.communicators.blocking = blocking;
        return make_nccl_transport(ring_end(rank, ranks, timeout, news), ids, options);
      },
      py::arg("ids"), py::arg("rank"), py::arg("ranks"), py::arg("timeout"), py::arg("news"),
      py::arg("registered") = false, py::arg("blocking") = false, py::arg("max_ctas") = 0);
  // The extension has the class only where it is built with CUDA.
  if (py::detail::get_type_info(typeid(RingEnd)) == nullptr) py::class_<RingEnd>(m, "RingEnd");
  // The ends and the transports of a rank in a ring of two levels.
  m.def(
      "levels",
      [](int rank, int ranks, int per_host, Milliseconds timeout, const News& news) {
        return levels_of(ring_end(rank, ranks, timeout, news), per_host);
      },
      py::arg("rank"), py::arg("ranks"), py::arg("per_host"), py::arg("timeout"), py::arg("news"));
  m.def("multiprocessors", [](const Transport& transport) { return transport.multiprocessors(); });
  m.def(
      "abort", [](Transport& transport, const std::string& reason) { transport.abort(reason); },
      py::call_guard<NoGil>());
  m.def(
      "nccl_level",
      [](const RingEnd& end, const std::vector<std::string>& ids, int max_ctas) {
        const NoGil release;
        NcclOptions options;
        options.communicators.max_ctas = max_ctas;
        return make_nccl_transport(end, ids, options);
      },
      py::arg("end"), py::arg("ids"), py::arg("max_ctas") = 0);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_controls(m);
  bind_kernels(m);
  bind_runtime(m);
  bind_graphs(m);
  bind_communicators(m);
  bind_transports(m);
  bind_ce(m);
  bind_blas(m);
}
