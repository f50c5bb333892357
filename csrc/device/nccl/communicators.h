// What transports over NCCL share: communicators of their own, whose calls can be given up.
#pragma once

#ifdef RTP_WITH_CUDA

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/handles.h"

namespace rtp {

// The opaque id that one rank makes and all ranks of a communicator need.
std::string nccl_unique_id();

// The version of the NCCL that torch loaded, and the one whose header was compiled against, as NCCL_VERSION codes.
int nccl_loaded_version();
std::string nccl_loaded_version_name();  // "2.30.7"
int nccl_compiled_version();

struct CommunicatorOptions {
  int min_ctas = 0;  // thread blocks, and so SMs, that NCCL may use; 0: NCCL chooses
  int max_ctas = 0;
  // A call returns when it is done. Otherwise NCCL starts and joins a thread for every group of calls, which tens of
  // microseconds go to, but which it also joins before it frees a communicator; with blocking ones, a rank that does
  // not come to their start is waited for without end, and a call that a dead peer holds up ends by ncclCommRevoke, if
  // the NCCL that is loaded has it, else never.
  bool blocking = false;
};

class NcclCommunicators {
 public:
  // One communicator for each of `ids`, which are the same on every rank. On the current device. Collective. Throws
  // RingTimeout where a rank does not come in time.
  NcclCommunicators(const std::vector<std::string>& ids, int rank, int ranks, const CommunicatorOptions& options,
                    std::chrono::milliseconds timeout);

  // Calls `enqueue` with a communicator and waits until that has settled. `what` starts messages.
  void call(size_t index, const std::string& what, const std::function<void(ncclComm_t)>& enqueue);

  // The same for a call whose result NCCL writes once every rank has come, on a thread of its own: null until then.
  void* receive(size_t index, const std::string& what, const std::function<void(ncclComm_t, void**)>& enqueue);

  // Makes whoever waits in a call, and later ones that would wait, throw. What is enqueued goes on. On any thread.
  void give_up_waiting() noexcept { given_up_ = true; }

  // Whether no communicator has been given up or ended.
  bool open();

  // What a communicator has reported since; nothing while all is well.
  std::optional<std::string> asynchronous_error() noexcept;

  // Ends what is enqueued, here and now. Idempotent. Later calls throw.
  void abort() noexcept;
  // Gives the communicators up without ending what is enqueued on them.
  void leak() noexcept;
  // The orderly end, together with all ranks. Idempotent.
  void finalize();

 private:
  using Mutex = std::timed_mutex;

  void wait_until_ready(std::unique_lock<Mutex>& lock, size_t index, const std::string& what);
  void check_open(size_t index, const std::string& what) const;
  // Whether no thread is inside a call any more, which is then kept so by `lock`.
  bool end_calls(std::unique_lock<Mutex>& lock) noexcept;

  std::chrono::milliseconds timeout_;
  std::atomic<bool> given_up_ = false;
  bool blocking_;
  Mutex mutex_;  // NCCL must not be inside a call when a communicator is aborted
  std::vector<Communicator> comms_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
