#include "device/cuda_streams.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

namespace rtp {
namespace {

thread_local int scoped = -1;  // device of the innermost DeviceScope of this thread

class CudaGraph : public Graph {
 public:
  // `memory`: the pool of the memory that the graph uses.
  CudaGraph(cudaGraph_t captured, std::shared_ptr<GraphMemory> memory) : memory_(std::move(memory)) {
    RTP_CUDA_CHECK(cudaGraphInstantiate(&executable_, captured, 0));
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  // CUDA frees a graph that still runs once it has ended; its memory is leaked, because a destructor must not wait.
  ~CudaGraph() override {
    if (!idle()) static_cast<void>(new std::shared_ptr<GraphMemory>(std::move(memory_)));
    cudaGraphExecDestroy(executable_);
  }

  bool idle() const override { return !launched_ || ended_.reached(); }

  void launch(cudaStream_t stream) {
    RTP_CUDA_CHECK(cudaGraphLaunch(executable_, stream));
    launched_ = true;
    ended_.record(stream, 0);
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
  bool launched_ = false;
  Event ended_;  // end of the newest launch
  std::shared_ptr<GraphMemory> memory_;
};

}  // namespace

cudaStream_t current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

DeviceScope::DeviceScope(at::Device device) {
  if (!device.has_index() || scoped == device.index()) return;
  before_ = c10::cuda::ExchangeDevice(device.index());
  device_ = device.index();
  outer_ = std::exchange(scoped, device_);
}

DeviceScope::~DeviceScope() {
  if (device_ < 0) return;
  scoped = outer_;
  if (before_ != device_) static_cast<void>(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before_)));
}

CudaStreams::CudaStreams(at::Device device) : device_(device) {
  const DeviceScope scope(device);
  side_ = Stream::with_priority(0);
  int current = 0;
  RTP_CUDA_CHECK(cudaGetDevice(&current));
  RTP_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, current));
}

StreamEvent CudaStreams::event(cudaStream_t stream) const {
  const DeviceScope scope(device_);
  auto event = events_.take();
  event->record(stream, capture());
  return event;
}

uint64_t CudaStreams::capture() const {
  if (capture_) return *capture_;
  const DeviceScope scope(device_);  // the default stream depends on the current device
  return capture_of(restore_ ? main_ : compute());
}

void CudaStreams::begin_pass() {
  capture_.reset();
  capture_ = capture();
  ++passes_;
}

void CudaStreams::end_pass() {
  if (--passes_ == 0) capture_.reset();
}

void CudaStreams::enter() {
  if (entered_++ == 0) scope_.emplace(device_);
}

void CudaStreams::leave() {
  if (--entered_ == 0) scope_.reset();
}

Moment CudaStreams::moment(cudaStream_t stream) const {
  const DeviceScope scope(device_);
  auto event = std::make_shared<Event>(Event::timing());
  event->record(stream);
  return event;
}

void CudaStreams::block(cudaStream_t stream, const StreamEvent& after, uint64_t within) const {
  if (!after) return;
  const DeviceScope scope(device_);  // the default stream depends on the current device
  const auto event = std::static_pointer_cast<Event>(after);
  if (event->capture() == within) event->block(stream);
}

void CudaStreams::order_after(cudaStream_t stream, const StreamEvent& event) const {
  if (event && std::static_pointer_cast<Event>(event)->stream() != stream) block(stream, event, capture());
}

void CudaStreams::select_compute_stream(int index) {
  if ((index == 1) == (restore_ != nullptr)) return;
  if (index == 1) {
    const auto before = c10::cuda::getCurrentCUDAStream(device_.index());
    main_ = before.stream();
    restore_ = std::make_shared<c10::cuda::CUDAStream>(before);
    c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(side_.get(), device_.index()));
  } else {
    c10::cuda::setCurrentCUDAStream(*std::static_pointer_cast<c10::cuda::CUDAStream>(restore_));
    restore_ = nullptr;
  }
}

// Uses an owned stream, because the caller's may be the default stream, which cannot be captured. An uncaptured run on
// the same stream first allocates lasting memory, such as the workspace of cuBLAS, outside the graph. The capture mode
// is thread-local, so CUDA calls of other threads, such as the watchdog's and torch's, do not affect the capture.
void CudaStreams::begin_graph_stream(bool captured) {
  RTP_ASSERT(caller_stream_ == nullptr && restore_ == nullptr, "the graph stream is current already");
  const DeviceScope scope(device_);
  if (graph_stream_.get() == nullptr) graph_stream_ = Stream::with_priority(0);
  const auto before = c10::cuda::getCurrentCUDAStream(device_.index());
  std::static_pointer_cast<Event>(event(before.stream()))->block(graph_stream_.get());
  caller_stream_ = std::make_shared<c10::cuda::CUDAStream>(before);
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(graph_stream_.get(), device_.index()));
  if (!captured) return;
  try {
    if (graph_memory_ == nullptr) graph_memory_ = std::make_shared<GraphMemory>(device_);
    graph_memory_->begin();
    RTP_CUDA_CHECK(cudaStreamBeginCapture(graph_stream_.get(), cudaStreamCaptureModeThreadLocal));
    capturing_ = true;
  } catch (...) {
    if (graph_memory_ != nullptr) graph_memory_->end();
    abandon_graph_stream();
    throw;
  }
}

std::shared_ptr<Graph> CudaStreams::end_graph_stream() {
  RTP_ASSERT(caller_stream_ != nullptr, "the graph stream is not current");
  const DeviceScope scope(device_);
  std::shared_ptr<Graph> graph;
  try {
    if (capturing_) {
      cudaGraph_t captured = nullptr;
      capturing_ = false;
      const cudaError_t status = cudaStreamEndCapture(graph_stream_.get(), &captured);
      graph_memory_->end();
      RTP_CUDA_CHECK(status);
      const std::shared_ptr<void> discard(captured, [](cudaGraph_t made) { cudaGraphDestroy(made); });
      graph = std::make_shared<CudaGraph>(captured, graph_memory_);
    }
    const StreamEvent here = event(graph_stream_.get());
    const auto caller = std::static_pointer_cast<c10::cuda::CUDAStream>(std::exchange(caller_stream_, nullptr));
    c10::cuda::setCurrentCUDAStream(*caller);
    std::static_pointer_cast<Event>(here)->block(caller->stream());
  } catch (...) {
    abandon_graph_stream();
    throw;
  }
  return graph;
}

void CudaStreams::abandon_graph_stream() noexcept {
  if (caller_stream_ == nullptr) return;
  const DeviceScope scope(device_);
  if (std::exchange(capturing_, false)) {
    cudaGraph_t captured = nullptr;
    cudaStreamEndCapture(graph_stream_.get(), &captured);  // gives no graph if the capture was invalidated
    if (captured != nullptr) cudaGraphDestroy(captured);
    cudaGetLastError();
    graph_memory_->end();
  }
  const auto caller = std::static_pointer_cast<c10::cuda::CUDAStream>(std::exchange(caller_stream_, nullptr));
  c10::cuda::setCurrentCUDAStream(*caller);
  try {
    std::static_pointer_cast<Event>(event(graph_stream_.get()))->block(caller->stream());
  } catch (...) {  // an earlier error is already being propagated
  }
}

void CudaStreams::launch(Graph& graph) {
  const DeviceScope scope(device_);
  static_cast<CudaGraph&>(graph).launch(compute());
}

double CudaStreams::seconds(const Moment& from, const Moment& to) {
  const DeviceScope scope(device_);
  return std::static_pointer_cast<Event>(to)->since(*std::static_pointer_cast<Event>(from));
}

}  // namespace rtp
