#include "engine/shards/copied/copied_shards.h"

#include <algorithm>

#include "base/checks.h"
#include "device/nccl/symmetric_memory.h"
#include "engine/shards/copied/copy_pulls.h"
#include "transport/ce/peer_memory.h"
#include "transport/transport.h"

namespace rtp {
namespace {

class CopiedShards : public ShardSource {
 public:
  CopiedShards(const std::string& id, int rank, int ranks, int64_t bytes, at::Device device,
               std::chrono::milliseconds timeout)
      : ShardSource(rank, ranks),
        device_(device),
        copies_(device),
        communicators_({id}, rank, ranks, device, CommunicatorOptions{}, timeout),
        peers_(communicators_, rank, ranks) {
    const DeviceScope scope(device_);
    region_.memory = allocate_symmetric(std::max<int64_t>(bytes, 1), device_);
  }

  ~CopiedShards() override {
    if (closed_) return;
    communicators_.leak();  // peers may copy from this memory
    static_cast<void>(new PeerRegion(std::move(region_)));
  }

  at::Tensor memory(int64_t offset, int64_t bytes) const override {
    const int64_t all = region_.memory.numel();
    RTP_CHECK_VALUE(offset >= 0 && bytes >= 0 && offset + bytes <= all, "expected a place in ", all, " bytes, got ",
                    bytes, " at ", offset);
    return region_.memory.narrow(0, offset, bytes);
  }

  std::string address() const override { return ""; }

  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override {
    const DeviceScope scope(device_);
    expect_counts(addresses.size(), bytes.size(), offsets.size());
    region_ = peers_.share(region_.memory);
    offsets_ = offsets;
    set_offsets(region_.bases[rank()], offsets[rank()]);
  }

  at::Device device() const override { return region_.memory.device(); }
  bool maps(int owner) const override { return owner == rank(); }
  at::Tensor at(size_t, const at::Tensor& local, int, const std::vector<int64_t>&) const override { return local; }

  std::shared_ptr<Pull> pull(const std::vector<size_t>& parameters, int owner,
                             const std::vector<at::Tensor>& targets) override {
    std::vector<const std::byte*> sources;
    for (size_t index = 0; index < targets.size(); ++index) {
      sources.push_back(region_.bases[owner] + offsets_[owner][parameters[index]]);
      pulled_bytes_ += static_cast<int64_t>(targets[index].nbytes());
    }
    return copies_.start(targets, sources);
  }

  void close() noexcept override {
    if (std::exchange(closed_, true)) return;
    try {
      const DeviceScope scope(device_);
      copies_.synchronize();
      peers_.withdraw(region_);
      communicators_.abort();
    } catch (const std::exception&) {  // the ring has failed before
      communicators_.leak();
      static_cast<void>(new PeerRegion(std::move(region_)));
    }
  }

 private:
  const at::Device device_;
  CopyPulls copies_;
  NcclCommunicators communicators_;
  PeerMemory peers_;
  PeerRegion region_;
  std::vector<std::vector<int64_t>> offsets_;  // by rank and parameter
  bool closed_ = false;
};

}  // namespace

std::shared_ptr<ShardSource> make_copied_shards(const std::string& id, int rank, int ranks, int64_t bytes,
                                                at::Device device, std::chrono::milliseconds timeout) {
  return make_owned<CopiedShards>(id, rank, ranks, bytes, device, timeout);
}

}  // namespace rtp
