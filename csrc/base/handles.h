// Move-only owners of CUDA and NCCL objects. Destructors never throw.
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
      cudaGetLastError(); /* clears the error, so that torch's next launch check does not report it again */   \
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

// Returns the id of the CUDA graph capture that a stream takes part in, or 0 for none. Throws CudaError if the capture
// has been invalidated: until it ends, no work can be enqueued on the stream.
inline uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // type of the CUDA runtime API
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

// Returns whether `query` reports completion; an error counts as completion. Clears cudaErrorNotReady from the last
// error of the thread, because torch checks the last error after its next launch and would throw. Relaxes the capture
// mode of the calling thread: otherwise CUDA would refuse the query during a capture and invalidate the capture. The
// queried object itself must not be captured.
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
  // Creates an event with timing.
  static Event timing() { return Event(cudaEventDefault); }
  Event(Event&& other) noexcept
      : event_(std::exchange(other.event_, nullptr)), stream_(other.stream_), capture_(other.capture_) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(stream_, other.stream_);
    std::swap(capture_, other.capture_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  // `capture`: id of the capture that the stream takes part in, if the caller has it already.
  void record(cudaStream_t stream, uint64_t capture) {
    RTP_CUDA_CHECK(cudaEventRecord(event_, stream));
    stream_ = stream;
    capture_ = capture;
  }
  void record(cudaStream_t stream) { record(stream, capture_of(stream)); }
  cudaStream_t stream() const { return stream_; }  // stream of the last record
  uint64_t capture() const { return capture_; }    // id of the capture that recorded it
  // Returns whether the point has been reached; a stream error counts as reached.
  bool reached() const {
    return has_ended([this] { return cudaEventQuery(event_); });
  }
  void block(cudaStream_t stream) const { RTP_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
  // Returns the seconds from the timing event `before` to this one. Blocks the host until both have been reached.
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
  cudaStream_t stream_ = nullptr;
  uint64_t capture_ = 0;
};

// An owned non-blocking stream: it does not synchronize with the default stream.
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

  // Creates a stream on the current device whose kernels are scheduled before those of lower priority.
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
  // Returns whether all enqueued work has ended; an error counts as ended. Not allowed while the stream is captured.
  bool idle() const {
    return has_ended([this] { return cudaStreamQuery(stream_); });
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// An owned NCCL communicator. The destructor aborts it unless it was released.
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

// A group of NCCL calls of this thread. An exception ends the group too: an open group would absorb every later NCCL
// call of the thread, including torch's.
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
