// Base class of CUDA transports between ranks: owned communicators, and a watchdog for their hops.
#pragma once

#ifdef RTP_WITH_CUDA

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/nccl/communicators.h"
#include "transport/cuda_transport.h"
#include "transport/nccl/peer_status.h"
#include "transport/nccl/watchdog.h"
#include "transport/peer_state.h"

namespace rtp {

// The first failure among the transports of one rank. The others end their waits, too.
class SharedFailure {
 public:
  // Whether hops of a transport that was destroyed may still run. They may use slots of another one.
  std::atomic<bool> hops_run_on = false;

  void set(const Failure& failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = failure;
  }
  std::optional<Failure> get() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
};

// The parameters of one rank's end of a ring, or of the part of a ring that a transport of two levels connects.
struct RingEnd {
  int rank = 0;
  int ranks = 1;
  at::Device device;
  std::chrono::milliseconds timeout;
  std::shared_ptr<PeerStatus> peer_status;           // of the whole ring; null: failures are detected by the timeout
  int first = 0;                                     // the rank in the whole ring of rank 0
  int shards = 0;                                    // the ranks of the whole ring; 0: `ranks`
  int distance = 1;                                  // between the ranks that the trial hops connect
  std::shared_ptr<CudaStreams> streams = nullptr;    // shared by the transports of the rank; null: new ones
  std::shared_ptr<SharedFailure> failure = nullptr;  // the same; null: there is one transport
};

// Returns the ends of the two transports of a composite, inside the host and between hosts, where groups of `per_host`
// consecutive ranks share a host.
std::pair<RingEnd, RingEnd> levels_of(const RingEnd& ring, int per_host);

// A derived class calls run_trial_hops() and start() last in its constructor and stop() first in its destructor,
// because these functions and the watchdog call its virtual functions.
class SupervisedTransport : public CudaTransport {
 public:
  // `ids`: the unique ids of the communicators, equal on all ranks. Collective.
  SupervisedTransport(const RingEnd& end, const std::vector<std::string>& ids, const CommunicatorOptions& options);
  ~SupervisedTransport() override;

  std::unique_ptr<Transfer> post(const Hop& hop) final;
  void before_graph() final { check(); }
  void after_graph(const std::string& operation, const StreamEvent& end) final;
  void check() const final;
  void abort(const std::string& reason) noexcept final;
  void close() final;
  void expect_no_graphs() const final { communicators_.expect_no_graphs(); }
  // Aborts the communicators instead of finalizing them, because a destructor must not wait for peers. Waits for hops
  // in flight.
  void drop() noexcept final;

 protected:
  // Posts one hop per channel, so that errors of NCCL occur before the ring is used. Collective.
  void run_trial_hops();
  void start();
  void stop() noexcept { watchdog_->stop(); }

  // The events at which a hop has ended; null: the end of its enqueued work.
  struct Ends {
    StreamEvent sent;      // the sent memory may be overwritten
    StreamEvent received;  // the data has arrived
  };
  // Enqueues a hop on the stream of its channel.
  virtual Ends enqueue(const Hop& hop, cudaStream_t stream) = 0;
  // For enqueue(): supervises the work enqueued so far, which waits for `peer`; post() supervises the whole hop as
  // waiting for its sender. Returns the event of this point.
  StreamEvent supervise(const Hop& hop, int peer, cudaStream_t stream);
  // Keep the memory of slots alive until their enqueued work has ended, even if the ring fails.
  void keep_alive(const at::Tensor& slot) { slots_[slot.data_ptr()] = slot; }
  void drop_slot(const at::Tensor& slot) { slots_.erase(slot.data_ptr()); }
  // Returns whether all enqueued work has ended; waits for aborted work.
  bool all_hops_ended() noexcept;
  // For destructors: stops the watchdog, and leaks the memory of slots that may still be in use.
  void leak_slots_in_use() noexcept;
  // Makes enqueued work end. Returns true if it must be called again. Callable from any thread.
  virtual bool give_up() noexcept;
  // For slots registered with NCCL: throws if a graph is being captured, because they cannot be allocated or freed
  // then.
  void refuse_capture() const;
  // Waits for the hops and computes of a registered slot before its memory is freed, which is not ordered after any
  // stream.
  void finish_uses(Channel channel) const;
  // Deregisters additional memory before the communicators are finalized.
  virtual void deregister_all() {}

  const RingEnd end_;
  NcclCommunicators communicators_;

 private:
  std::optional<Failure> find_failure(const std::vector<int>& oldest);

  void watch(const Hop& hop, const StreamEvent& done);
  void watch_rest(const Hop& hop, cudaStream_t stream) noexcept;

  bool captured_ = false;  // the user has captured graphs; their hops are not supervised
  std::map<void*, at::Tensor> slots_;
  int unanswered_ = 0;  // consecutive polls that found an awaited process ended
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
