#include "transport_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "cuda_lanes.h"

namespace rtp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(50);
constexpr auto kSpin = std::chrono::microseconds(500);  // enqueueing a hop takes microseconds: too short to sleep

ncclUniqueId parse_id(const std::string& bytes) {
  ncclUniqueId id;
  RTP_CHECK_VALUE(bytes.size() == sizeof(id), "transport nccl: expected a unique id of ", sizeof(id), " bytes, got ",
                  bytes.size());
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

// Polls a non-blocking communicator until it has settled.
void settle(ncclComm_t comm, Clock::time_point deadline, const char* what) {
  const auto start = Clock::now();
  ncclResult_t status = ncclInProgress;
  while (true) {
    RTP_NCCL_CHECK(ncclCommGetAsyncError(comm, &status));
    if (status != ncclInProgress) break;
    const auto now = Clock::now();
    if (now > deadline) throw RingTimeout(concat("transport nccl: ", what, " did not finish in time"));
    if (now - start < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  RTP_NCCL_CHECK(status);
}

class NcclTransport : public CudaTransport {
 public:
  NcclTransport(const std::array<std::string, 2>& ids, int rank, int ranks, at::Device device,
                std::chrono::milliseconds timeout)
      : CudaTransport(device), timeout_(timeout) {
    const c10::cuda::CUDAGuard guard(device);
    const auto deadline = Clock::now() + timeout;
    for (size_t channel = 0; channel < ids.size(); ++channel) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;  // so that a dead peer can be given up on
      ncclComm_t comm = nullptr;
      RTP_NCCL_CHECK(ncclCommInitRankConfig(&comm, ranks, parse_id(ids[channel]), rank, &config));
      comms_[channel] = Communicator(comm);
      settle(comm, deadline, "the start of a communicator");
    }
    watchdog_ = std::thread([this] { watch(); });
  }

  ~NcclTransport() override {
    abort("dropped");
    stop_watchdog();
  }

  const char* name() const override { return "nccl"; }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    const c10::cuda::CUDAGuard guard(device_);
    const std::lock_guard lock(mutex_);
    check_healthy(hop);
    ncclComm_t comm = comms_[static_cast<size_t>(hop.channel)].get();
    cudaStream_t stream = lanes_.channel(hop.channel);
    RTP_NCCL_CHECK(ncclGroupStart());
    for (const Span& span : hop.send) {
      if (span.bytes > 0) RTP_NCCL_CHECK(ncclSend(span.data, span.bytes, ncclInt8, hop.to, comm, stream));
    }
    for (const Span& span : hop.receive) {
      if (span.bytes > 0) RTP_NCCL_CHECK(ncclRecv(span.data, span.bytes, ncclInt8, hop.from, comm, stream));
    }
    RTP_NCCL_CHECK(ncclGroupEnd());
    settle(comm, Clock::now() + timeout_, "the enqueueing of a hop");
    Event end;
    end.record(stream);
    pending_.push_back({hop.describe(), hop.from, Clock::now(), std::move(end)});
    return transfer(hop.channel);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      const std::lock_guard lock(mutex_);
      abort_locked(reason);
    } catch (...) {
    }
  }

  // Finalising waits for the peers, which a destructor must not; but hops that are still under way are waited for.
  void drop() noexcept override {
    const auto deadline = Clock::now() + timeout_;
    while (under_way() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    abort("dropped");
  }

  void close() override {
    stop_watchdog();
    const std::lock_guard lock(mutex_);
    for (Communicator& comm : comms_) {
      if (comm.get() == nullptr) continue;
      RTP_NCCL_CHECK(ncclCommFinalize(comm.get()));
      settle(comm.get(), Clock::now() + timeout_, "the end of a communicator");
      RTP_NCCL_CHECK(ncclCommDestroy(comm.release()));
    }
    failure_ = "it was closed";
  }

 private:
  struct Pending {
    std::string description;
    int peer;
    Clock::time_point posted;
    Event end;
  };

  void check_healthy(const Hop& hop) const {
    if (!failure_.empty()) throw RingTimeout(concat(hop.describe(), ": the transport has failed: ", failure_));
  }

  bool under_way() noexcept {
    const std::lock_guard lock(mutex_);
    return failure_.empty() &&
           std::any_of(pending_.begin(), pending_.end(), [](const Pending& hop) { return !hop.end.reached(); });
  }

  void abort_locked(const std::string& reason) noexcept {
    if (failure_.empty()) failure_ = reason;
    for (Communicator& comm : comms_) comm.abort();
    pending_.clear();
  }

  // Runs on its own thread: finds asynchronous errors and hops that outlast the timeout, and aborts. The next call
  // into the ring raises.
  void watch() {
    cudaSetDevice(device_.index());
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      wake_.wait_for(lock, kPollInterval);
      if (stopping_ || !failure_.empty()) continue;
      for (Communicator& comm : comms_) {
        ncclResult_t status = ncclSuccess;
        if (ncclCommGetAsyncError(comm.get(), &status) != ncclSuccess ||
            (status != ncclSuccess && status != ncclInProgress)) {
          abort_locked(concat("NCCL reported code ", static_cast<int>(status), " (", ncclGetErrorString(status), ")"));
          break;
        }
      }
      while (!pending_.empty() && pending_.front().end.reached()) pending_.pop_front();
      if (!pending_.empty() && Clock::now() - pending_.front().posted > timeout_) {
        abort_locked(concat(pending_.front().description, ": rank ", pending_.front().peer,
                            " of the ring did not answer within ", timeout_.count() / 1000.0, " s"));
      }
    }
  }

  void stop_watchdog() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (watchdog_.joinable()) watchdog_.join();
  }

  std::chrono::milliseconds timeout_;
  std::array<Communicator, 2> comms_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::string failure_;
  std::deque<Pending> pending_;  // hops whose end has not been seen, oldest first
  std::thread watchdog_;
};

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

int nccl_compiled_version() { return NCCL_VERSION_CODE; }

std::shared_ptr<Transport> make_nccl_transport(const std::array<std::string, 2>& ids, int rank, int ranks,
                                               at::Device device, std::chrono::milliseconds timeout) {
  return std::make_shared<NcclTransport>(ids, rank, ranks, device, timeout);
}

}  // namespace rtp
