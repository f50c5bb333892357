// The functions of the simulated runtime: the second half of runtime.cpp, which includes it once.
#pragma once

extern "C" {

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "simulated error"; }
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int) {
  called("cudaDeviceGetAttribute");
  *value = attribute == cudaDevAttrMultiProcessorCount ? world().controls.multiprocessors : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  called("cudaGetDevice");
  *device = current_device();
  return cudaSuccess;
}
// Creates a context since CUDA 12.
cudaError_t cudaSetDevice(int device) {
  called("cudaSetDevice");
  chosen_device = device;
  make_context();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  called("cudaDeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
// All ranks share the device.
cudaError_t cudaDeviceSynchronize() {
  called("cudaDeviceSynchronize");
  std::unique_lock lock(world().mutex);
  if (world().controls.capturing) mistake("cudaDeviceSynchronize while a graph is captured");
  if (forbidden("cudaDeviceSynchronize")) return note(cudaErrorStreamCaptureUnsupported);
  wait_until(lock, [] {
    for (const auto& [handle, stream] : streams()) {
      if (!stream->queue.empty() || stream->busy) return false;
    }
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  called("cudaDriverGetVersion");
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  called("cudaDeviceCanAccessPeer");
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  called("cudaStreamCreateWithPriority");
  if (flags != cudaStreamNonBlocking || (priority != -5 && priority != 0)) return note(cudaErrorInvalidValue);
  *stream = make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  called("cudaStreamCreateWithFlags");
  *stream = make_stream();
  return cudaSuccess;
}
// Like the real function: returns at once, and the stream ends with its work.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  called("cudaStreamDestroy");
  const std::lock_guard lock(world().mutex);
  const auto found = streams().find(stream);
  if (found == streams().end()) {
    mistake("cudaStreamDestroy of what is not a stream");
    return note(cudaErrorInvalidResourceHandle);
  }
  found->second->ending = true;
  streams().erase(found);
  world().changed.notify_all();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  called("cudaStreamSynchronize");
  {
    const std::lock_guard lock(world().mutex);
    if (stream->capture != nullptr) mistake("cudaStreamSynchronize of a stream that is being captured");
  }
  synchronize(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  called("cudaStreamQuery");
  const std::lock_guard lock(world().mutex);
  if (world().controls.capturing || stream->capture) mistake("cudaStreamQuery of a stream that is being captured");
  return note(stream->queue.empty() && !stream->busy ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  called("cudaStreamGetCaptureInfo");
  const std::lock_guard lock(world().mutex);
  const bool active = world().controls.capturing || stream->capture != nullptr;
  *status = invalidated(stream) ? cudaStreamCaptureStatusInvalidated
            : active            ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusNone;
  if (*status == cudaStreamCaptureStatusInvalidated) return cudaSuccess;  // the other results are invalid then
  *id = stream->capture != nullptr ? stream->capture->id : active ? 1 : 0;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(stream->capture.get());
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  called("cudaThreadExchangeStreamCaptureMode");
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  called("cudaEventCreateWithFlags");
  *event = new CUevent_st{{}, (flags & cudaEventDisableTiming) == 0, {}, {}, current_device()};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  called("cudaEventDestroy");
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  called("cudaEventRecord");
  {
    const std::lock_guard lock(world().mutex);
    if (event->device != device_of(stream)) {
      mistake("cudaEventRecord of an event of another device than the stream's");
      return note(cudaErrorInvalidResourceHandle);
    }
    if (invalidated(stream)) return note(cudaErrorStreamCaptureInvalidated);
    event->capture = stream->capture;
    if (event->capture != nullptr) {
      record_in_capture(*event, stream);
      event->point = nullptr;
      return cudaSuccess;
    }
  }
  auto point = enqueue(stream, [] {});
  const std::lock_guard lock(world().mutex);
  event->point = std::move(point);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  called("cudaEventQuery");
  const std::lock_guard lock(world().mutex);
  if (forbidden("cudaEventQuery")) return note(cudaErrorStreamCaptureUnsupported);
  if (event->capture != nullptr) {
    mistake("cudaEventQuery of an event that was recorded in a capture");
    return note(cudaErrorCapturedEvent);
  }
  return note(event->point == nullptr || event->point->reached ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  called("cudaEventSynchronize");
  std::unique_lock lock(world().mutex);
  wait_until(lock, [point = event->point] { return point == nullptr || point->reached; });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  called("cudaEventElapsedTime");
  const std::lock_guard lock(world().mutex);
  if (!from->timing || !to->timing || from->point == nullptr || to->point == nullptr)
    return note(cudaErrorInvalidResourceHandle);
  if (!from->point->reached || !to->point->reached) return note(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(to->point->time - from->point->time).count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  called("cudaStreamWaitEvent");
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(world().mutex);
    if (invalidated(stream)) return note(cudaErrorStreamCaptureInvalidated);
    if (event->capture != nullptr) return note(wait_in_capture(stream, *event));
    point = event->point;
    if (stream->capture != nullptr && point != nullptr) {
      mistake("a stream that is being captured waits for an event from outside of the capture");
      stream->capture->invalid = true;
      return note(cudaErrorStreamCaptureIsolation);
    }
  }
  if (point == nullptr) return cudaSuccess;
  enqueue(stream, [point] {
    std::unique_lock lock(world().mutex);
    wait_until(lock, [&] { return point->reached; });
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream) {
  called("cudaMemcpyAsync");
  use("cudaMemcpyAsync", stream);
  {
    const std::lock_guard lock(world().mutex);
    if (invalidated(stream)) return note(cudaErrorStreamCaptureInvalidated);
  }
  enqueue(stream, [=] { copy(to, from, bytes); }, {{to, bytes}, {from, bytes}});
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind) {
  called("cudaMemcpy");
  {
    const std::lock_guard lock(world().mutex);
    if (forbidden("cudaMemcpy")) return note(cudaErrorStreamCaptureUnsupported);
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  called("cudaMemsetAsync");
  enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  called("cudaMemset");
  std::memset(to, value, bytes);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 struct cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
  called("cudaMemcpyBatchAsync");
  {
    const std::lock_guard lock(world().mutex);
    if (world().controls.capturing || stream->capture) mistake("cudaMemcpyBatchAsync cannot be captured");
  }
  const std::vector<void*> targets(to, to + count);
  const std::vector<const void*> sources(from, from + count);
  const std::vector<size_t> sizes(bytes, bytes + count);
  Memory memory;
  for (size_t i = 0; i < count; ++i) memory.insert(memory.end(), {{to[i], bytes[i]}, {from[i], bytes[i]}});
  const auto copies = [=] {
    for (size_t i = 0; i < targets.size(); ++i) copy(targets[i], sources[i], sizes[i]);
  };
  enqueue(stream, copies, std::move(memory));
  return cudaSuccess;
}
#endif

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  called("cudaMalloc");
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return note(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* memory) {
  called("cudaFree");
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
// Pinned memory of this rank must not be unpinned while one of its streams uses it.
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned int) {
  called("cudaHostRegister");
  const std::lock_guard lock(world().mutex);
  const bool added = world().pinned.insert({memory, {bytes, this_maker()}}).second;
  return note(added ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* memory) {
  called("cudaHostUnregister");
  const std::lock_guard lock(world().mutex);
  const auto found = world().pinned.find(memory);
  if (found == world().pinned.end()) return note(cudaErrorHostMemoryNotRegistered);
  if (in_use(found->second.maker, memory, found->second.bytes)) mistake("cudaHostUnregister of memory in use");
  world().pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  called("cudaHostGetDevicePointer");
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult* result) {
  called("cudaGetDriverEntryPointByVersion");
  const std::lock_guard lock(world().mutex);
  const std::string name(symbol);
  *function = nullptr;
  if (!world().controls.lacks_memory_ops) {
    if (name == "cuStreamWaitValue32") *function = reinterpret_cast<void*>(&wait_value32);
    if (name == "cuStreamBatchMemOp") *function = reinterpret_cast<void*>(&batch_mem_op);
    if (name == "cuStreamWriteValue32") *function = reinterpret_cast<void*>(&write_value32);
  }
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
