// What CUDA transports between ranks share: communicators of their own, and a watchdog over their hops.
#pragma once

#ifdef RTP_WITH_CUDA

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/nccl/communicators.h"
#include "transport/cuda_transport.h"
#include "transport/nccl/peer_status.h"
#include "transport/nccl/watchdog.h"

namespace rtp {

// One end of a ring, as all its transports need it.
struct RingEnd {
  int rank = 0;
  int ranks = 1;
  at::Device device;
  std::chrono::milliseconds timeout;
  std::shared_ptr<PeerStatus> news;  // null: failures of other ranks are noticed by the timeout
};

// A derived class calls try_out() and start() last in its constructor and stop() first in its destructor: its functions
// are called there, and by the watchdog in between.
class SupervisedTransport : public CudaTransport {
 public:
  // `ids`: the unique ids of the communicators, the same on every rank. Collective.
  SupervisedTransport(const RingEnd& end, const std::vector<std::string>& ids, const CommunicatorOptions& options);
  ~SupervisedTransport() override;

  std::unique_ptr<Transfer> post(const Hop& hop) final;
  void before_graph() final { check(); }
  void after_graph(const std::string& operation, const StreamEvent& end) final;
  void check() const final;
  void abort(const std::string& reason) noexcept final;
  void close() final;
  // Finalising waits for the peers, which a destructor must not; but hops that are still under way are waited for.
  void drop() noexcept final;

 protected:
  // Makes a first hop of each channel, so that what NCCL refuses is known before anybody relies on it. Collective.
  void try_out();
  void start();
  void stop() noexcept { watchdog_->stop(); }

  // Where in its channel a hop has ended; null: at the end of what it enqueues.
  struct Ends {
    StreamEvent sent;      // what it sends from may be overwritten
    StreamEvent received;  // what it receives has arrived
  };
  // Enqueues a hop on the stream of its channel.
  virtual Ends enqueue(const Hop& hop, cudaStream_t stream) = 0;
  // For enqueue(): what is enqueued so far waits for `peer`; the whole hop counts as waiting for its sender. Returns
  // the mark of this point.
  StreamEvent supervise(const Hop& hop, int peer, cudaStream_t stream);
  // Slots whose memory must outlive what is enqueued, even if the ring fails.
  void remember(const at::Tensor& slot) { slots_[slot.data_ptr()] = slot; }
  void forget(const at::Tensor& slot) { slots_.erase(slot.data_ptr()); }
  // Whether nothing that was enqueued can still run: it has been seen to end. Waits for what has been given up.
  bool nothing_left() noexcept;
  // For destructors: stops the watchdog, and leaves the memory of slots that may still be in use to the process.
  void keep_what_is_in_use() noexcept;
  // Lets what is enqueued come to an end. True: to be called again until it has. On any thread.
  virtual bool give_up() noexcept;
  // For slots that NCCL knows: none is made or ended while a graph is captured.
  void refuse_capture() const;
  // Before the memory of such a slot goes back to the GPU, which is not ordered after any stream: waits for its hops
  // and for the computes, which have been ordered after every use.
  void finish_uses(Channel channel) const;
  // Takes down what lies on the communicators besides the slots, before they end in good order.
  virtual void take_down() {}

  const RingEnd end_;
  NcclCommunicators communicators_;

 private:
  std::optional<Failure> look(const std::vector<int>& oldest);

  void watch(const Hop& hop, const StreamEvent& done);
  void watch_rest(const Hop& hop, cudaStream_t stream) noexcept;

  bool captured_ = false;  // there are graphs of the user, whose hops nobody watches
  std::map<void*, at::Tensor> slots_;
  int unanswered_ = 0;  // looks in a row that found an awaited process ended
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
