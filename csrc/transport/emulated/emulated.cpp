#include "transport/emulated/emulated.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "base/checks.h"
#include "transport/emulated/wire.h"
#ifdef RTP_WITH_CUDA
#include "transport/cuda_transport.h"
#include "transport/emulated/links.h"
#endif

namespace rtp {
namespace {

// Calls copy(to, from, bytes) and clear(to, bytes) for a hop to oneself. Shards of unequal size are truncated or padded
// with zeros.
template <typename Copy, typename Clear>
void loop_back(const Hop& hop, Copy copy, Clear clear) {
  for (size_t index = 0; index < hop.receive.size(); ++index) {
    const Span& to = hop.receive[index];
    const size_t bytes = std::min(to.bytes, hop.send[index].bytes);
    if (bytes > 0) copy(to.data, hop.send[index].data, bytes);
    if (to.bytes > bytes) clear(to.data + bytes, to.bytes - bytes);
  }
}

class DoneTransfer : public Transfer {
 public:
  void wait_received() override {}
  void wait_sent() override {}
  Moment arrived() const override { return host_moment(arrived_); }

 private:
  HostClock::time_point arrived_ = HostClock::now();
};

class EmulatedHost : public Transport {
 public:
  const char* name() const override { return "emulated"; }
  bool loopback() const override { return true; }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    loop_back(
        hop, [](std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); },
        [](std::byte* to, size_t bytes) { std::memset(to, 0, bytes); });
    return std::make_unique<DoneTransfer>();
  }

  at::Tensor allocate(Channel, int64_t bytes) override { return at::empty({bytes}, at::kByte); }
  void abort(const std::string&) noexcept override {}
  void close() override {}
};

class WireTransfer : public Transfer {
 public:
  WireTransfer(Wire& wire, std::shared_ptr<Wire::Message> message) : wire_(wire), message_(std::move(message)) {}

  void wait_received() override { wire_.wait(*message_); }
  void wait_sent() override { wire_.wait(*message_); }
  Moment arrived() const override { return wire_.arrived(*message_); }

 private:
  Wire& wire_;
  std::shared_ptr<Wire::Message> message_;
};

// Weights and gradients have a wire each, as on a full-duplex link they travel in opposite directions.
class EmulatedWire : public EmulatedHost {
 public:
  explicit EmulatedWire(Wire::Rate rate) : weights_(rate), gradients_(rate) {}

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    std::vector<Wire::Piece> pieces;
    loop_back(
        hop, [&](std::byte* to, const std::byte* from, size_t bytes) { pieces.push_back({to, from, bytes}); },
        [&](std::byte* to, size_t bytes) { pieces.push_back({to, nullptr, bytes}); });
    Wire& wire = hop.channel == Channel::weight ? weights_ : gradients_;
    return std::make_unique<WireTransfer>(wire, wire.send(std::move(pieces)));
  }

  void abort(const std::string&) noexcept override { close(); }
  void close() override {
    weights_.close();
    gradients_.close();
  }

 private:
  Wire weights_, gradients_;
};

#ifdef RTP_WITH_CUDA
class EmulatedDevice : public CudaTransport {
 public:
  EmulatedDevice(at::Device device, const std::string& link)
      : CudaTransport(device), link_(make_emulated_link(link, device)) {}

  const char* name() const override { return "emulated"; }
  bool loopback() const override { return true; }
  bool takes_graphs() const override { return true; }  // no other rank takes part
  int multiprocessors() const override { return link_->multiprocessors(); }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    const DeviceScope scope(device_);
    cudaStream_t stream = this->stream(hop.channel);
    std::vector<Copy> copies;
    loop_back(
        hop, [&](std::byte* to, const std::byte* from, size_t bytes) { copies.push_back({to, from, bytes}); },
        [&](std::byte* to, size_t bytes) { RTP_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream)); });
    link_->copy(hop.channel, copies, stream);
    const StreamEvent done = streams_.event(stream);
    return transfer(done, done);
  }

  void abort(const std::string&) noexcept override {}
  void close() override {}

 private:
  std::unique_ptr<EmulatedLink> link_;
};
#endif

}  // namespace

std::shared_ptr<Transport> make_emulated_transport(at::Device device, const std::optional<std::string>& link) {
  if (device.is_cpu()) {
    if (link) return make_owned<EmulatedWire>(Wire::rate_of(*link));
    return std::make_shared<EmulatedHost>();
  }
#ifdef RTP_WITH_CUDA
  if (device.is_cuda()) return std::make_shared<EmulatedDevice>(device, link.value_or("sm-local"));
#endif
  RTP_CHECK_VALUE(false, "transport emulated: expected a CPU device, or a CUDA device in a build with CUDA, got ",
                  device.str());
  return nullptr;
}

}  // namespace rtp
