// Captures and graphs of the simulated runtime.
#include <algorithm>
#include <atomic>
#include <iterator>

#include "simulator.h"

namespace simulated {

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

namespace {

std::set<Capture*>& captures() {
  static auto* all = new std::set<Capture*>;  // captures that have not ended
  return *all;
}

// Returns `last` and all nodes that precede them.
std::set<size_t> reached(const Capture& capture, const std::set<size_t>& last) {
  std::set<size_t> found = last, next = last;
  while (!next.empty()) {
    const size_t node = *next.begin();
    next.erase(next.begin());
    for (const size_t before : capture.nodes[node].after) {
      if (found.insert(before).second) next.insert(before);
    }
  }
  return found;
}

// Runs every node after its predecessors; nodes of different streams run concurrently.
void run(const std::vector<Node>& nodes) {
  std::map<cudaStream_t, std::vector<size_t>> streams;
  for (size_t node = 0; node < nodes.size(); ++node) streams[nodes[node].stream].push_back(node);
  std::vector<bool> done(nodes.size(), false);
  const auto run_lane = [&](const std::vector<size_t>& lane) {
    for (const size_t node : lane) {
      {
        std::unique_lock lock(world().mutex);
        wait_until(lock, [&] {
          return std::all_of(nodes[node].after.begin(), nodes[node].after.end(),
                             [&](size_t each) { return done[each]; });
        });
      }
      dawdle();
      nodes[node].work();
      const std::lock_guard lock(world().mutex);
      done[node] = true;
      world().changed.notify_all();
    }
  };
  std::vector<std::thread> threads;
  for (const auto& [stream, lane] : streams) threads.emplace_back(run_lane, lane);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void keep_with_graph(cudaStream_t stream, std::shared_ptr<void> object) {
  if (stream->capture != nullptr) stream->capture->kept.push_back(std::move(object));
}

Capture* own_capture() {
  for (Capture* capture : captures()) {
    if (capture->thread == std::this_thread::get_id()) return capture;
  }
  return nullptr;
}

cudaError_t wait_in_capture(cudaStream_t stream, const CUevent_st& event) {
  if (event.capture->ended || stream->host || (stream->capture != nullptr && stream->capture != event.capture)) {
    mistake("a wait for an event of a capture that the stream cannot take part in");
    return cudaErrorCapturedEvent;
  }
  stream->capture = event.capture;
  std::set<size_t>& after = event.capture->tails[stream];
  const Forgotten kind = stream == event.capture->origin ? Forgotten::waits_of_computes : Forgotten::waits_of_hops;
  if (world().controls.forgotten == kind) {
    event.capture->mutated = true;
  } else {
    after.insert(event.after.begin(), event.after.end());
  }
  return cudaSuccess;
}

void record_in_capture(CUevent_st& event, cudaStream_t stream) {
  Capture& capture = *stream->capture;
  event.after = capture.tails[stream];
  const Forgotten kind = stream == capture.origin ? Forgotten::ends_of_computes : Forgotten::ends_of_hops;
  if (world().controls.forgotten != kind || event.after.size() != 1) return;
  const Node& newest = capture.nodes[*event.after.begin()];
  if (newest.stream != stream) return;
  event.after = newest.after;
  capture.mutated = true;
}

bool forbidden(const char* function) {
  Capture* const capture = own_capture();
  if (capture == nullptr || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  mistake(std::string(function) + " by a thread that captures");
  capture->invalid = true;
  return true;
}

}  // namespace simulated

using namespace simulated;

// Opaque in CUDA's headers.
struct CUgraph_st {
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<void>> kept;
};
struct CUuserObject_st {
  void* data;
  cudaHostFn_t destroy;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<Node>> nodes;
  std::vector<std::shared_ptr<void>> kept;
  std::shared_ptr<Point> last;  // end of the newest launch
};

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  called("cudaStreamBeginCapture");
  static std::atomic<unsigned long long> ids{1};  // 1: of controls.capturing
  const std::lock_guard lock(world().mutex);
  if (stream->host || stream->capture != nullptr || mode != cudaStreamCaptureModeThreadLocal) {
    return note(cudaErrorInvalidValue);
  }
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++ids;
  stream->capture->origin = stream;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->tails[stream];
  captures().insert(stream->capture.get());
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  called("cudaStreamEndCapture");
  *graph = nullptr;
  std::shared_ptr<Capture> capture;  // destroyed after the mutex is released: its tensors may need Python's lock
  const std::lock_guard lock(world().mutex);
  capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return note(cudaErrorInvalidValue);
  if (capture->thread != std::this_thread::get_id()) return note(cudaErrorStreamCaptureWrongThread);
  const std::set<size_t> joined = reached(*capture, capture->tails[stream]);
  bool unjoined = false;
  for (const auto& [each, tails] : capture->tails) {
    unjoined |= !std::includes(joined.begin(), joined.end(), tails.begin(), tails.end());
    each->capture = nullptr;
  }
  capture->ended = true;
  captures().erase(capture.get());
  if (capture->invalid) return note(cudaErrorStreamCaptureInvalidated);
  if (unjoined && !capture->mutated) return note(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{std::move(capture->nodes), std::move(capture->kept)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  called("cudaGraphInstantiate");
  if (flags != 0) return note(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{std::make_shared<const std::vector<Node>>(graph->nodes), graph->kept, nullptr};
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  called("cudaGraphDestroy");
  delete graph;
  return cudaSuccess;
}

// Launches of one graph run one after the other, on any stream.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  called("cudaGraphLaunch");
  Memory memory;
  for (const Node& node : *executable->nodes) memory.insert(memory.end(), node.memory.begin(), node.memory.end());
  std::shared_ptr<Point> before;
  const auto here = std::make_shared<Point>();
  {
    std::unique_lock lock(world().mutex);
    wait_until(lock, [] { return !world().controls.full_queue; });
    if (stream->capture != nullptr) {
      mistake("cudaGraphLaunch into a stream that is being captured");
      return note(cudaErrorInvalidValue);
    }
    before = std::exchange(executable->last, here);
    ++world().launches[this_maker()];
  }
  const auto work = [nodes = executable->nodes, kept = executable->kept, before, here, maker = this_maker()] {
    if (before != nullptr) {
      std::unique_lock lock(world().mutex);
      wait_until(lock, [&] { return before->reached; });
    }
    run(*nodes);
    const std::lock_guard lock(world().mutex);
    --world().launches[maker];
    here->reached = true;
    world().changed.notify_all();
  };
  enqueue(stream, work, std::move(memory));
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  called("cudaGraphExecDestroy");
  delete executable;  // a launch that runs keeps what it needs
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned int count,
                                 unsigned int flags) {
  called("cudaUserObjectCreate");
  if (count != 1 || flags != cudaUserObjectNoDestructorSync) return note(cudaErrorInvalidValue);
  *object = new CUuserObject_st{data, destroy};
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int) {
  called("cudaUserObjectRelease");
  object->destroy(object->data);
  delete object;
  return cudaSuccess;
}

// `graph`: of a capture that has not ended, from cudaStreamGetCaptureInfo.
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
  called("cudaGraphRetainUserObject");
  if (graph == nullptr) return cudaUserObjectRelease(object, count);  // controls.capturing: no graph will come of it
  const std::lock_guard lock(world().mutex);
  auto* const capture = reinterpret_cast<Capture*>(graph);
  if (captures().count(capture) == 0 || count != 1 || flags != cudaGraphUserObjectMove) {
    return note(cudaErrorInvalidValue);
  }
  capture->kept.emplace_back(object, [](cudaUserObject_t last) { cudaUserObjectRelease(last, 1); });
  return cudaSuccess;
}

}  // extern "C"
