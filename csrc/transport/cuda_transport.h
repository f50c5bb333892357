// A transport on CUDA streams: the stream of a channel orders its hops, and events order everything else.
#pragma once

#ifdef RTP_WITH_CUDA

#include <functional>
#include <memory>

#include "device/cuda_streams.h"
#include "transport/transport.h"

namespace rtp {

class CudaTransport : public Transport {
 public:
  explicit CudaTransport(at::Device device);

  using Transport::order_end_after;
  // A buffer never changes its channel, so an earlier hop of the same buffer precedes in the same stream.
  void order_end_after(const Hop&, End, Transfer&, End) override {}

  at::Tensor allocate(Channel, int64_t bytes) override;
  void release(Channel, const at::Tensor& slot) override;

  // Throws if the transport has failed.
  virtual void check() const {}

 protected:
  // The events at which a hop has ended. `finish_sending`, if set, enqueues what remains of the sending end and returns
  // its event: it is called once, when something first waits for that end.
  struct Ends {
    StreamEvent sent;      // the sent memory may be overwritten
    StreamEvent received;  // the data has arrived
    std::function<StreamEvent()> finish_sending;
  };
  std::unique_ptr<Transfer> transfer(Ends ends);

  at::Device device_;
  CudaStreams& streams_;

 private:
  CudaTransport(at::Device device, std::unique_ptr<CudaStreams> streams);
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
