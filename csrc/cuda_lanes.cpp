#include "cuda_lanes.h"

#include <ATen/ops/empty.h>

namespace rtp {
namespace {

class StreamTransfer : public Transfer {
 public:
  StreamTransfer(const CudaLanes& lanes, Channel channel) : lanes_(lanes), done_(lanes.mark(lanes.channel(channel))) {}
  void wait_received() override { CudaLanes::block(lanes_.compute(), done_); }
  void wait_sent() override { CudaLanes::block(lanes_.compute(), done_); }

 private:
  const CudaLanes& lanes_;
  Mark done_;
};

}  // namespace

std::unique_ptr<Transfer> CudaTransport::transfer(Channel channel) {
  return std::make_unique<StreamTransfer>(lanes_, channel);
}

at::Tensor CudaTransport::allocate(Channel, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

}  // namespace rtp
