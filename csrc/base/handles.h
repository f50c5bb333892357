// Move-only owners of CUDA and NCCL objects. Healthy paths call close(); destructors never throw.
#pragma once

#ifdef RTP_WITH_CUDA

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <utility>

#include "base/checks.h"

#define RTP_CUDA_CHECK(call)                                                                                   \
  do {                                                                                                         \
    const cudaError_t rtp_status = (call);                                                                     \
    if (rtp_status != cudaSuccess) {                                                                           \
      cudaGetLastError(); /* reported here: torch's next check of a launch must not find it again */           \
      throw ::rtp::CudaError(::rtp::concat(#call, " failed with code ", static_cast<int>(rtp_status), " (",    \
                                           cudaGetErrorString(rtp_status), ") at ", __FILE__, ":", __LINE__)); \
    }                                                                                                          \
  } while (false)

#define RTP_NCCL_CHECK(call)                                                                                   \
  do {                                                                                                         \
    const ncclResult_t rtp_status = (call);                                                                    \
    if (rtp_status != ncclSuccess && rtp_status != ncclInProgress)                                             \
      throw ::rtp::NcclError(::rtp::concat(#call, " failed with code ", static_cast<int>(rtp_status), " (",    \
                                           ncclGetErrorString(rtp_status), ") at ", __FILE__, ":", __LINE__)); \
  } while (false)

namespace rtp {

// Which capture of a CUDA graph a stream takes part in; 0: none. Throws CudaError where the capture has been
// invalidated: then nothing can be enqueued on the stream, and no id is valid, until whoever began it ends it.
inline uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // the runtime's own type
  RTP_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw CudaError(
        "the current stream takes part in the capture of a CUDA graph that was invalidated before this call "
        "(cudaStreamCaptureStatusInvalidated): since it began, something was called that CUDA does not permit during a "
        "capture, such as a synchronisation, cudaMalloc or cudaEventQuery in the thread that captures "
        "(cudaThreadExchangeStreamCaptureMode), or a wait for an event from outside of it; end the capture, which "
        "gives no graph, and capture again without that call");
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

// Whether the answer of `query` is that there is nothing left to wait for, which an error counts as. That there is
// stays the last error of the thread, which torch asks for after its next launch, and would throw. And a thread that
// captures may ask: CUDA would refuse, which must not pass for the end, and invalidate the capture. What is asked for
// must not be captured itself.
template <typename Query>
bool has_ended(Query&& query) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const bool exchanged = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  const cudaError_t answer = query();
  if (answer == cudaErrorNotReady) cudaGetLastError();
  if (exchanged) cudaThreadExchangeStreamCaptureMode(&mode);
  return answer != cudaErrorNotReady;
}

// A point in a stream.
class Event {
 public:
  Event() : Event(cudaEventDisableTiming) {}
  // One that knows when it was reached.
  static Event timing() { return Event(cudaEventDefault); }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)), capture_(other.capture_) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(capture_, other.capture_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  // `capture`: that the stream takes part in, where the caller knows it.
  void record(cudaStream_t stream, uint64_t capture) {
    RTP_CUDA_CHECK(cudaEventRecord(event_, stream));
    capture_ = capture;
  }
  void record(cudaStream_t stream) { record(stream, capture_of(stream)); }
  uint64_t capture() const { return capture_; }  // that it was recorded in
  // Whether the point has been reached; an error of the stream counts as its end.
  bool reached() const {
    return has_ended([this] { return cudaEventQuery(event_); });
  }
  void block(cudaStream_t stream) const { RTP_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
  // Seconds from a timing event to this one. The host waits until both have been reached.
  double since(const Event& before) const {
    RTP_CUDA_CHECK(cudaEventSynchronize(before.event_));
    RTP_CUDA_CHECK(cudaEventSynchronize(event_));
    float milliseconds = 0;
    RTP_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, before.event_, event_));
    return milliseconds / 1e3;
  }

 private:
  explicit Event(unsigned int flags) { RTP_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags)); }

  cudaEvent_t event_ = nullptr;
  uint64_t capture_ = 0;
};

// A stream that we made. It does not wait for the default stream.
class Stream {
 public:
  Stream() = default;
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // On the current device. Its work goes ahead of work of other streams that waits for the same resources.
  static Stream highest_priority() {
    int least = 0, greatest = 0;
    RTP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    return with_priority(greatest);
  }
  static Stream with_priority(int priority) {
    Stream made;
    RTP_CUDA_CHECK(cudaStreamCreateWithPriority(&made.stream_, cudaStreamNonBlocking, priority));
    return made;
  }

  cudaStream_t get() const { return stream_; }
  // Whether all that was enqueued has ended; an error counts as the end. Not while it is captured.
  bool idle() const {
    return has_ended([this] { return cudaStreamQuery(stream_); });
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// An NCCL communicator that we made. close() finalises it; a destructor that finds it open aborts it.
class Communicator {
 public:
  Communicator() = default;
  explicit Communicator(ncclComm_t comm) : comm_(comm) {}
  Communicator(Communicator&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Communicator& operator=(Communicator&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() { abort(); }

  ncclComm_t get() const { return comm_; }
  void abort() noexcept {
    if (comm_ != nullptr) ncclCommAbort(std::exchange(comm_, nullptr));
  }
  ncclComm_t release() noexcept { return std::exchange(comm_, nullptr); }

 private:
  ncclComm_t comm_ = nullptr;
};

// NCCL calls of this thread that go together. A group that is left by an exception ends too: one that stays open
// swallows every later NCCL call of the thread, torch's among them.
class NcclGroup {
 public:
  NcclGroup() { RTP_NCCL_CHECK(ncclGroupStart()); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup() {
    if (open_) ncclGroupEnd();
  }
  void end() {
    open_ = false;
    RTP_NCCL_CHECK(ncclGroupEnd());
  }

 private:
  bool open_ = true;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
