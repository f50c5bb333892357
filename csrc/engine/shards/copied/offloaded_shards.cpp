#include "base/checks.h"
#include "engine/shards/copied/copied_shards.h"
#include "engine/shards/copied/copy_pulls.h"
#include "engine/shards/host_shards.h"
#include "transport/transport.h"

namespace rtp {
namespace {

// Memory of the host that copy engines may read, until the end of this object.
class Pinned {
 public:
  explicit Pinned(const SharedMemory& memory) : data_(memory.data()) {
    const cudaError_t status = cudaHostRegister(data_, memory.bytes(), cudaHostRegisterDefault);
    if (status != cudaSuccess) {
      cudaGetLastError();
      throw CudaError(concat("cannot pin ", memory.bytes(), " bytes of the host: ", cudaGetErrorString(status)));
    }
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { cudaHostUnregister(data_); }

 private:
  std::byte* const data_;
};

class OffloadedShards : public HostShards {
 public:
  OffloadedShards(int rank, int ranks, int64_t bytes, at::Device device)
      : HostShards(rank, ranks, bytes), device_(device), copies_(device) {
    const DeviceScope scope(device_);
    pinned_.push_back(std::make_unique<Pinned>(memory_of(rank)));
  }

  ~OffloadedShards() override {
    try {
      const DeviceScope scope(device_);
      copies_.synchronize();
      pinned_.clear();
    } catch (const std::exception&) {  // a CUDA error, which the next call reports, too
    }
  }

  std::string address() const override { return map_address(); }

  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override {
    const DeviceScope scope(device_);
    expect_counts(addresses.size(), bytes.size(), offsets.size());
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank()) continue;
      map(peer, addresses[peer], bytes[peer], /*writable=*/true);  // not every GPU can pin read-only memory
      pinned_.push_back(std::make_unique<Pinned>(memory_of(peer)));
    }
    set_all_offsets(offsets);
  }

  bool maps(int) const override { return false; }

  std::shared_ptr<Pull> pull(const std::vector<size_t>& parameters, int owner,
                             const std::vector<at::Tensor>& targets) override {
    std::vector<const std::byte*> sources;
    for (size_t index = 0; index < targets.size(); ++index) {
      sources.push_back(shard_of(owner, parameters[index]));
      pulled_bytes_ += static_cast<int64_t>(targets[index].nbytes());
    }
    return copies_.start(targets, sources);
  }

 private:
  const at::Device device_;
  CopyPulls copies_;
  std::vector<std::unique_ptr<Pinned>> pinned_;
};

}  // namespace

std::shared_ptr<ShardSource> make_offloaded_shards(int rank, int ranks, int64_t bytes, at::Device device) {
  return make_owned<OffloadedShards>(rank, ranks, bytes, device);
}

}  // namespace rtp
