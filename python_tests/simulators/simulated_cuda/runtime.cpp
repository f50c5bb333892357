// The CUDA runtime of the simulation.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/delay.h"
#include "simulator.h"

namespace simulated {
namespace {

thread_local cudaStream_t asynchronous_compute = nullptr, chosen_compute = nullptr;
thread_local int chosen_device = -1;
thread_local cudaError_t last_error = cudaSuccess;

int current_device() { return chosen_device < 0 ? world().controls.first_device : chosen_device; }

// Called by functions that create a context.
void make_context(int device = current_device()) {
  const std::lock_guard lock(world().mutex);
  world().contexts.insert(device);
}

// Streams with a running thread, destroyed or not.
std::set<std::shared_ptr<CUstream_st>>& live() {
  static auto* all = new std::set<std::shared_ptr<CUstream_st>>;
  return *all;
}

bool overlap(const Memory& memory, const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  return std::any_of(memory.begin(), memory.end(), [=](const auto& chunk) {
    const auto* at = static_cast<const std::byte*>(chunk.first);
    return at < begin + bytes && begin < at + chunk.second;
  });
}

// Called on every use: the first use of a function by a rank may make the driver load code, which waits for all of the
// rank's streams.
void use(const std::string& function, cudaStream_t stream) {
  const std::lock_guard lock(world().mutex);
  if (!world().loaded.insert({stream->maker, function}).second) return;
  for (const auto& other : live()) {
    if (other->maker == stream->maker && other->waiting) {
      mistake("the first " + function + " of a rank while one of its streams waits for a value");
    }
  }
}

void run(std::shared_ptr<CUstream_st> stream) {
  std::unique_lock lock(world().mutex);
  while (true) {
    world().changed.wait(lock, [&] { return !stream->queue.empty() || stream->ending; });
    if (stream->queue.empty()) break;
    Queued next = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    stream->running = std::move(next.memory);
    lock.unlock();
    dawdle();
    next.work();
    // its tensors may need Python's lock to be destroyed, and the owner of that lock may wait for the mutex
    next.work = nullptr;
    lock.lock();
    stream->busy = false;
    stream->running.clear();
    world().changed.notify_all();
  }
  live().erase(stream);
  --world().threads;
  world().changed.notify_all();
}

// Existing streams; the pointer returned by CUDA's interface does not keep them alive.
std::map<cudaStream_t, std::shared_ptr<CUstream_st>>& streams() {
  static auto* all = new std::map<cudaStream_t, std::shared_ptr<CUstream_st>>;
  return *all;
}

cudaStream_t make_stream(int device = current_device()) {
  make_context(device);
  auto stream = std::make_shared<CUstream_st>();
  stream->device = device;
  const std::lock_guard lock(world().mutex);
  streams()[stream.get()] = stream;
  live().insert(stream);
  ++world().threads;
  std::thread(run, stream).detach();
  return stream.get();
}

CUstream_st& host_stream() {
  static auto* stream = [] {
    auto* made = new CUstream_st;
    made->host = true;
    return made;
  }();
  return *stream;
}

int device_of(cudaStream_t stream) { return stream->host ? current_device() : stream->device; }

// Returns whether the stream takes part in an invalidated capture that has not ended. Requires the mutex.
bool invalidated(cudaStream_t stream) { return stream->capture != nullptr && stream->capture->invalid; }

// Returns whether a function needs a context; the others query the driver or release objects with their own context.
bool needs_context(const std::string& function) {
  static const std::set<std::string> none{"cudaSetDevice",
                                          "cudaGetDevice",
                                          "cudaDeviceGetAttribute",
                                          "cudaDriverGetVersion",
                                          "cudaDeviceCanAccessPeer",
                                          "cudaStreamDestroy",
                                          "cudaEventDestroy",
                                          "cudaGraphDestroy",
                                          "cudaGraphExecDestroy",
                                          "cudaUserObjectRelease",
                                          "cudaFreeHost",
                                          "cudaThreadExchangeStreamCaptureMode",
                                          "cudaGetDriverEntryPointByVersion"};
  return function.starts_with("cuda") && none.count(function) == 0;
}

}  // namespace

World& world() {
  static auto* only = new World;  // never destroyed, because streams may outlive other objects
  return *only;
}

void mistake(const std::string& text) { world().mistakes.push_back(text); }

Calls& calls() {
  thread_local Calls mine;
  return mine;
}

void called(const char* function) {
  ++calls()[function];
  if (needs_context(function)) make_context();
}

cudaError_t note(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

void check_launch() {
  if (const cudaError_t found = std::exchange(last_error, cudaSuccess)) {
    const std::lock_guard lock(world().mutex);
    mistake("after a launch torch finds an error that an earlier call has left: " + std::to_string(found));
  }
}

Maker this_maker() {
  static std::atomic<Maker> makers{0};
  thread_local const Maker mine = ++makers;
  return mine;
}

bool in_use(Maker maker, const void* data, size_t bytes) {
  return std::any_of(live().begin(), live().end(), [&](const auto& stream) {
    if (stream->maker != maker) return false;
    return overlap(stream->running, data, bytes) ||
           std::any_of(stream->queue.begin(), stream->queue.end(),
                       [&](const Queued& queued) { return overlap(queued.memory, data, bytes); });
  });
}

void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready) {
  while (!ready() && !world().controls.released) world().changed.wait_for(lock, std::chrono::milliseconds(5));
}

void dawdle() {
  int time = 0;
  {
    const std::lock_guard lock(world().mutex);
    if (world().controls.delay_us > 0) time = static_cast<int>(world().random() % (world().controls.delay_us + 1));
    if (time > 0 && world().random() % 16 == 0) time *= 8;  // occasionally one is much slower than the others
  }
  if (time > 0) std::this_thread::sleep_for(std::chrono::microseconds(time));
}

void copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes / 2);
  dawdle();
  std::memcpy(static_cast<std::byte*>(to) + bytes / 2, static_cast<const std::byte*>(from) + bytes / 2,
              bytes - bytes / 2);
}

std::shared_ptr<Point> enqueue(cudaStream_t stream, Work work, Memory memory) {
  auto point = std::make_shared<Point>();
  if (stream->host) {
    work();
    point->reached = true;
    point->time = std::chrono::steady_clock::now();
    return point;
  }
  const std::lock_guard lock(world().mutex);
  if (stream->capture != nullptr) {
    Capture& capture = *stream->capture;
    capture.nodes.push_back({std::move(work), std::move(memory), capture.tails[stream], stream});
    capture.tails[stream] = {capture.nodes.size() - 1};
    return nullptr;
  }
  const auto and_reach = [work = std::move(work), point] {
    work();
    const std::lock_guard lock(world().mutex);
    point->reached = true;
    point->time = std::chrono::steady_clock::now();
  };
  stream->queue.push_back({and_reach, std::move(memory)});
  world().changed.notify_all();
  return point;
}

void synchronize(cudaStream_t stream) {
  std::unique_lock lock(world().mutex);
  const auto idle = [&] { return stream->queue.empty() && !stream->busy; };
  // Also when waits are released, because later work still runs.
  while (!idle()) world().changed.wait_for(lock, std::chrono::milliseconds(5));
}

std::shared_ptr<CUstream_st> held(cudaStream_t stream) {
  const auto found = streams().find(stream);
  return found == streams().end() ? nullptr : found->second;
}

void choose_compute(cudaStream_t stream) { chosen_compute = stream; }

void set_compute(bool asynchronous) {
  chosen_compute = nullptr;
  if (asynchronous == (asynchronous_compute != nullptr)) return;
  if (asynchronous) {
    asynchronous_compute = make_stream(0);  // on the device of the rings
  } else {
    cudaStreamDestroy(std::exchange(asynchronous_compute, nullptr));
  }
}

cudaStream_t compute_stream() {
  if (asynchronous_compute == nullptr) return &host_stream();
  return chosen_compute != nullptr ? chosen_compute : asynchronous_compute;
}

namespace {

// Waits for a value in memory that another stream or the host writes.
Work wait_for(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  const auto* memory = reinterpret_cast<uint32_t*>(address);
  std::shared_ptr<CUstream_st> kept;  // keeps the stream alive for a graph
  {
    const std::lock_guard lock(world().mutex);
    kept = held(stream);
  }
  return [=] {
    std::unique_lock lock(world().mutex);
    stream->waiting = kept != nullptr;
    wait_until(lock, [=] {
      const uint32_t now = __atomic_load_n(memory, __ATOMIC_ACQUIRE);
      return flags == CU_STREAM_WAIT_VALUE_EQ ? now == value : static_cast<int32_t>(now - value) >= 0;
    });
    stream->waiting = false;
  };
}

Work write(CUdeviceptr address, cuuint32_t value) {
  return [=] {
    const std::lock_guard lock(world().mutex);
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
    world().changed.notify_all();
  };
}

// One work item, and one node of a graph. The device supports no 64-bit operations, which CUDA makes optional.
CUresult CUDAAPI batch_mem_op(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* operations, unsigned int) {
  called("cuStreamBatchMemOp");
  {
    const std::lock_guard lock(world().mutex);
    if (invalidated(stream)) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  std::vector<Work> works;
  Memory memory;
  for (const auto* operation = operations; operation != operations + count; ++operation) {
    if (operation->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
        operation->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (operation->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
      const auto& wait = operation->waitValue;
      if (wait.flags != CU_STREAM_WAIT_VALUE_GEQ && wait.flags != CU_STREAM_WAIT_VALUE_EQ) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      works.push_back(wait_for(stream, wait.address, wait.value, wait.flags));
      memory.emplace_back(reinterpret_cast<const void*>(wait.address), sizeof(uint32_t));
    } else if (operation->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      works.push_back(write(operation->writeValue.address, operation->writeValue.value));
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const auto all = [works = std::move(works)] {
    for (const Work& work : works) {
      if (&work != works.data()) dawdle();
      work();
    }
  };
  enqueue(stream, all, std::move(memory));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI wait_value32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = address;
  operation.waitValue.value = value;
  operation.waitValue.flags = flags;
  return batch_mem_op(stream, 1, &operation, 0);
}

CUresult CUDAAPI write_value32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = address;
  operation.writeValue.value = value;
  return batch_mem_op(stream, 1, &operation, 0);
}

}  // namespace
}  // namespace simulated

using namespace simulated;

// Like torch's, which records a device without a context instead of making it current.
namespace {

thread_local int target_device = -1;

}  // namespace

c10::DeviceIndex c10::cuda::ExchangeDevice(DeviceIndex device) {
  int before = std::exchange(target_device, -1);
  if (before < 0) {
    cudaGetDevice(&before);
    if (before == device) return device;
  }
  cudaSetDevice(device);
  return static_cast<DeviceIndex>(before);
}

cudaError_t c10::cuda::MaybeSetDevice(DeviceIndex device) {
  bool has_context = false;
  {
    const std::lock_guard lock(world().mutex);
    called("cuDevicePrimaryCtxGetState");
    has_context = world().contexts.count(device) > 0;
  }
  target_device = has_context ? -1 : device;
  return has_context ? cudaSetDevice(device) : cudaSuccess;
}

c10::cuda::CUDAStream c10::cuda::getCurrentCUDAStream(int) { return CUDAStream(compute_stream()); }

void c10::cuda::setCurrentCUDAStream(CUDAStream stream) { choose_compute(stream.stream()); }

int rtp::launch_delay(int64_t microseconds, void* stream) {
  enqueue(static_cast<cudaStream_t>(stream),
          [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
  return cudaSuccess;
}

#include "runtime_functions.h"
