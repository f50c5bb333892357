// NCCL communicators shared by all NCCL-based transports, with calls that can be abandoned.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/handles.h"
#include "device/nccl/live_graphs.h"

namespace rtp {

// Returns a new opaque id; one rank creates it for all ranks of a communicator.
std::string nccl_unique_id();

// The version of the NCCL library that torch loaded, and that of the header this was compiled with, as NCCL_VERSION
// codes.
int nccl_loaded_version();
std::string nccl_loaded_version_name();  // "2.30.7"
int nccl_compiled_version();

struct CommunicatorOptions {
  int min_ctas = 0;  // number of thread blocks, and so of SMs, that NCCL may use; 0: chosen by NCCL
  int max_ctas = 0;
  // Whether NCCL calls block until they complete. For non-blocking communicators, NCCL starts and joins a thread per
  // group of calls, which costs tens of microseconds, but it also joins the thread before it frees the communicator.
  // With blocking ones, a call that waits for a dead peer ends only by ncclCommRevoke, if the loaded NCCL has it.
  bool blocking = false;
};

class NcclCommunicators {
 public:
  // Creates one communicator per id in `ids`, which are the same on every rank, on `device`. Collective. Throws
  // RingTimeout if a rank does not join in time.
  NcclCommunicators(const std::vector<std::string>& ids, int rank, int ranks, at::Device device,
                    const CommunicatorOptions& options, std::chrono::milliseconds timeout);
  NcclCommunicators(const NcclCommunicators&) = delete;
  NcclCommunicators& operator=(const NcclCommunicators&) = delete;
  ~NcclCommunicators() { abort(); }

  // Calls `enqueue` with a communicator and waits until the call has completed. `what` is the prefix of error messages.
  void call(size_t index, const std::string& what, const std::function<void(ncclComm_t)>& enqueue);
  // The same for work on a stream. `captured`: the stream if it may be part of a capture, else null.
  void call(size_t index, const std::string& what, cudaStream_t captured,
            const std::function<void(ncclComm_t)>& enqueue);

  // The same for a call whose result NCCL writes from another thread once every rank has called; null if NCCL writes
  // none.
  void* receive(size_t index, const std::string& what, const std::function<void(ncclComm_t, void**)>& enqueue);

  // Makes current and later waits in calls throw. Enqueued work continues. Callable from any thread.
  void give_up_waiting() noexcept { given_up_ = true; }

  // Returns whether all communicators are still open.
  bool open();

  // Returns an asynchronous error of a communicator; nothing if there is none.
  std::optional<std::string> asynchronous_error() noexcept;

  // Throws RotationError if graphs hold work of these communicators: NCCL ends a communicator only after them.
  void expect_no_graphs() const;

  // Aborts all enqueued work at once. Idempotent. Later calls throw.
  void abort() noexcept;
  // Releases the communicators without aborting their enqueued work.
  void leak() noexcept;
  // Finalizes the communicators, collectively with all ranks. Idempotent.
  void finalize();

 private:
  using Mutex = std::timed_mutex;

  void wait_until_ready(std::unique_lock<Mutex>& lock, size_t index, const std::string& what);
  void check_open(size_t index, const std::string& what) const;
  // Makes pending calls end and acquires `lock`, which keeps new calls out. Returns false if a call does not end.
  bool end_calls(std::unique_lock<Mutex>& lock) noexcept;

  std::chrono::milliseconds timeout_;
  std::atomic<bool> given_up_ = false;
  bool blocking_;
  LiveGraphs graphs_;
  Mutex mutex_;  // NCCL must not be inside a call when a communicator is aborted
  std::vector<Communicator> comms_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
