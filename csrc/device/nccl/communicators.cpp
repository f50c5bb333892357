#include "device/nccl/communicators.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <thread>

#include "device/nccl/library.h"

namespace rtp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(500);  // enqueueing a hop takes microseconds: too short to sleep

constexpr auto kShortCall = std::chrono::milliseconds(200);  // a longer call waits for a peer
constexpr auto kFreed = std::chrono::seconds(2);             // from the end of a graph to CUDA's word of it
constexpr auto kRevoked = std::chrono::seconds(5);           // limit for pending calls to end after revocation

ncclUniqueId parse_id(const std::string& bytes) {
  ncclUniqueId id;
  RTP_CHECK_VALUE(bytes.size() == sizeof(id), "transport: expected an NCCL unique id of ", sizeof(id), " bytes, got ",
                  bytes.size());
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::string describe(ncclResult_t status) {
  return concat("NCCL reported code ", static_cast<int>(status), " (", ncclGetErrorString(status), ")");
}

// Returns a blocking communicator. Its start waits without limit for a rank that does not come, so it runs on a thread
// of its own, which a timeout leaves behind.
ncclComm_t join_in_time(const ncclUniqueId& id, int rank, int ranks, at::Device device, const ncclConfig_t& config,
                        std::chrono::milliseconds timeout) {
  struct Start {
    ncclConfig_t config;
    ncclComm_t comm = nullptr;
  };
  const auto start = std::make_shared<Start>(Start{config});
  std::packaged_task join([=] {
    const c10::cuda::CUDAGuard guard(device);
    return ncclCommInitRankConfig(&start->comm, ranks, id, rank, &start->config);
  });
  auto ended = join.get_future();
  std::thread(std::move(join)).detach();
  if (ended.wait_for(timeout) != std::future_status::ready) {
    throw RingTimeout(concat("the start of a communicator: a rank of the ring did not answer (waited ",
                             std::chrono::duration<double>(timeout).count(), " s)"));
  }
  RTP_NCCL_CHECK(ended.get());
  return start->comm;
}

}  // namespace

std::string nccl_unique_id() {
  ncclUniqueId id;
  RTP_NCCL_CHECK(ncclGetUniqueId(&id));
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

int nccl_loaded_version() {
  int version = 0;
  RTP_NCCL_CHECK(ncclGetVersion(&version));
  return version;
}

std::string nccl_loaded_version_name() {
  const int version = nccl_loaded_version();
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

int nccl_compiled_version() { return NCCL_VERSION_CODE; }

NcclCommunicators::NcclCommunicators(const std::vector<std::string>& ids, int rank, int ranks, at::Device device,
                                     const CommunicatorOptions& options, std::chrono::milliseconds timeout)
    : timeout_(timeout), blocking_(options.blocking) {
  comms_.reserve(ids.size());
  std::unique_lock lock(mutex_);
  for (size_t index = 0; index < ids.size(); ++index) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking_ ? 1 : 0;
    config.splitShare = 0;  // communicators that share resources wait for each other
    if (options.min_ctas > 0) config.minCTAs = options.min_ctas;
    if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
    const ncclUniqueId id = parse_id(ids[index]);
    ncclComm_t comm = nullptr;
    if (blocking_) {
      comm = join_in_time(id, rank, ranks, device, config, timeout);
    } else {
      RTP_NCCL_CHECK(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
    }
    comms_.emplace_back(comm);
    wait_until_ready(lock, index, "the start of a communicator");
  }
}

void NcclCommunicators::check_open(size_t index, const std::string& what) const {
  if (comms_[index].get() == nullptr) throw RotationError(concat(what, ": its communicator has been closed"));
}

void NcclCommunicators::wait_until_ready(std::unique_lock<Mutex>& lock, size_t index, const std::string& what) {
  if (blocking_) return;
  const auto start = Clock::now();
  while (true) {
    ncclResult_t status = ncclInProgress;
    RTP_NCCL_CHECK(ncclCommGetAsyncError(comms_[index].get(), &status));
    if (status == ncclSuccess) return;
    if (status != ncclInProgress) throw NcclError(concat(what, ": ", describe(status)));
    const auto waited = Clock::now() - start;
    if (waited > timeout_) {
      throw RingTimeout(concat(what, ": a rank of the ring did not answer (waited ",
                               std::chrono::duration<double>(waited).count(), " s)"));
    }
    lock.unlock();
    if (waited < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    lock.lock();
    check_open(index, what);
    if (given_up_) throw RotationError(concat(what, ": the ring has failed"));
  }
}

void NcclCommunicators::call(size_t index, const std::string& what, const std::function<void(ncclComm_t)>& enqueue) {
  std::unique_lock lock(mutex_);
  check_open(index, what);
  enqueue(comms_[index].get());
  wait_until_ready(lock, index, what);
}

void NcclCommunicators::call(size_t index, const std::string& what, cudaStream_t captured,
                             const std::function<void(ncclComm_t)>& enqueue) {
  call(index, what, [&](ncclComm_t comm) {
    if (captured != nullptr) graphs_.add(captured);
    enqueue(comm);
  });
}

void* NcclCommunicators::receive(size_t index, const std::string& what,
                                 const std::function<void(ncclComm_t, void**)>& enqueue) {
  auto result = std::make_unique<void*>(nullptr);
  try {
    call(index, what, [&](ncclComm_t comm) { enqueue(comm, result.get()); });
  } catch (...) {
    static_cast<void>(result.release());  // leaked: NCCL may still write to it
    throw;
  }
  return *result;
}

bool NcclCommunicators::end_calls(std::unique_lock<Mutex>& lock) noexcept {
  if (!blocking_) {  // pending calls check given_up_ and return
    lock.lock();
    return true;
  }
  if (lock.try_lock_for(kShortCall)) return true;
  // Reading comms_ without the lock is safe: a thread inside a call does not change the handles.
  using Revoke = ncclResult_t (*)(ncclComm_t, int flags);
  const auto revoke = nccl_function<Revoke>("ncclCommRevoke");
  if (revoke == nullptr) return false;
  for (const Communicator& comm : comms_) {
    if (comm.get() != nullptr) revoke(comm.get(), 0);
  }
  return lock.try_lock_for(kRevoked);
}

bool NcclCommunicators::open() {
  const std::lock_guard lock(mutex_);
  return std::all_of(comms_.begin(), comms_.end(), [](const Communicator& comm) { return comm.get() != nullptr; });
}

std::optional<std::string> NcclCommunicators::asynchronous_error() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;  // a call is in progress: the next poll reports the error
  for (const Communicator& comm : comms_) {
    if (comm.get() == nullptr) continue;
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm.get(), &status);
    if (asked != ncclSuccess) status = asked;
    if (status != ncclSuccess && status != ncclInProgress) {
      return describe(status);
    }
  }
  return std::nullopt;
}

void NcclCommunicators::expect_no_graphs() const {
  const int left = graphs_.left(kFreed);
  if (left == 0) return;
  throw RotationError(concat("close: expected no CUDA graph with hops of this ring, got ", left,
                             ": delete it first (`graph.reset()`), because NCCL ends no communicator before"));
}

void NcclCommunicators::abort() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!end_calls(lock)) return;  // freeing a communicator during a call would crash the process
  for (Communicator& comm : comms_) {
    if (comm.get() == nullptr || graphs_.left(std::chrono::milliseconds(0)) == 0) {
      comm.abort();
    } else {  // ends enqueued work, but returns only when the graphs are gone: commDestroySync in NCCL's src/init.cc
      std::thread([kept = comm.release()] { ncclCommAbort(kept); }).detach();
    }
  }
}

void NcclCommunicators::leak() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!end_calls(lock)) return;
  for (Communicator& comm : comms_) comm.release();
}

void NcclCommunicators::finalize() {
  std::unique_lock lock(mutex_);
  for (size_t index = 0; index < comms_.size(); ++index) {
    if (comms_[index].get() == nullptr) continue;
    RTP_NCCL_CHECK(ncclCommFinalize(comms_[index].get()));
    wait_until_ready(lock, index, "the end of a communicator");
    RTP_NCCL_CHECK(ncclCommDestroy(comms_[index].release()));
  }
}

}  // namespace rtp
