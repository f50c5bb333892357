#include "transport/emulated/links.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "device/nccl/communicators.h"

namespace rtp {
namespace {

constexpr size_t kCut = 512;                      // bytes: alignment of the parts of a copy
constexpr size_t kHostChunk = 4 << 20;            // bytes: one chunk is uploaded while the next one is downloaded
constexpr auto kStart = std::chrono::minutes(1);  // timeout for communicators of one rank

// Returns `copies` cut into pieces of at most `most` bytes.
std::vector<Copy> cut(const std::vector<Copy>& copies, size_t most) {
  std::vector<Copy> pieces;
  for (const Copy& copy : copies) {
    for (size_t done = 0; done < copy.bytes; done += most) {
      pieces.push_back({static_cast<std::byte*>(copy.to) + done, static_cast<const std::byte*>(copy.from) + done,
                        std::min(most, copy.bytes - done)});
    }
  }
  return pieces;
}

void follow(cudaStream_t stream, cudaStream_t other) {
  Event reached;
  reached.record(other);
  reached.block(stream);
}

class SmLocal : public EmulatedLink {
 public:
  void copy(Channel, const std::vector<Copy>& copies, cudaStream_t stream) override {
    for (const Copy& copy : copies) {
      RTP_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream));
    }
  }
};

class CeLocal : public EmulatedLink {
 public:
  explicit CeLocal(int streams) {
    if (!engine_.batched()) {
      throw RotationError("link ce-local needs cudaMemcpyBatchAsync, of CUDA 12.8 in the build and in the driver");
    }
    for (auto& channel : more_) {
      for (int made = 1; made < streams; ++made) channel.push_back(Stream::highest_priority());
    }
  }

  void copy(Channel channel, const std::vector<Copy>& copies, cudaStream_t stream) override {
    const auto& more = more_[static_cast<size_t>(channel)];
    std::vector<std::vector<Copy>> shares(more.size() + 1);
    for (const Copy& copy : copies) {
      const size_t each = (copy.bytes + shares.size() - 1) / shares.size();
      size_t share = 0;
      for (const Copy& piece : cut({copy}, (each + kCut - 1) / kCut * kCut)) shares[share++].push_back(piece);
    }
    const bool captured = capture_of(stream) != 0;
    for (const Stream& other : more) follow(other.get(), stream);
    engine_.copy(shares[0], stream, captured);
    for (size_t share = 1; share < shares.size(); ++share) {
      engine_.copy(shares[share], more[share - 1].get(), captured);
      follow(stream, more[share - 1].get());
    }
  }

 private:
  CopyEngine engine_;
  std::array<std::vector<Stream>, 2> more_;  // by channel: streams in addition to its own
};

class NcclSelf : public EmulatedLink {
 public:
  NcclSelf(int ctas, at::Device device)
      : communicators_({nccl_unique_id(), nccl_unique_id()}, 0, 1, device, CommunicatorOptions{std::min(ctas, 1), ctas},
                       kStart),
        ctas_(ctas) {}

  int multiprocessors() const override { return ctas_; }
  void copy(Channel channel, const std::vector<Copy>& copies, cudaStream_t stream) override {
    communicators_.call(static_cast<size_t>(channel), "link nccl-self: enqueueing a hop", stream, [&](ncclComm_t comm) {
      NcclGroup group;
      for (const Copy& copy : copies) {
        RTP_NCCL_CHECK(ncclSend(copy.from, copy.bytes, ncclInt8, 0, comm, stream));
        RTP_NCCL_CHECK(ncclRecv(copy.to, copy.bytes, ncclInt8, 0, comm, stream));
      }
      group.end();
    });
  }

 private:
  NcclCommunicators communicators_;
  int ctas_;  // 0: NCCL chooses
};

// Two pinned buffers per channel: one is copied to the GPU while the other is filled.
class Pcie : public EmulatedLink {
 public:
  Pcie() {
    for (Staging& staging : staging_) {
      staging.up = Stream::highest_priority();
      for (void*& chunk : staging.chunks) RTP_CUDA_CHECK(cudaHostAlloc(&chunk, kHostChunk, cudaHostAllocDefault));
    }
  }
  ~Pcie() override {
    for (Staging& staging : staging_) {
      for (void* chunk : staging.chunks) cudaFreeHost(chunk);
    }
  }

  void copy(Channel channel, const std::vector<Copy>& copies, cudaStream_t stream) override {
    Staging& staging = staging_[static_cast<size_t>(channel)];
    std::array<std::optional<Event>, 2> emptied;
    size_t turn = 0;
    for (const Copy& piece : cut(copies, kHostChunk)) {
      void* chunk = staging.chunks[turn];
      if (emptied[turn]) emptied[turn]->block(stream);
      RTP_CUDA_CHECK(cudaMemcpyAsync(chunk, piece.from, piece.bytes, cudaMemcpyDeviceToHost, stream));
      follow(staging.up.get(), stream);
      RTP_CUDA_CHECK(cudaMemcpyAsync(piece.to, chunk, piece.bytes, cudaMemcpyHostToDevice, staging.up.get()));
      emptied[turn].emplace().record(staging.up.get());
      turn = 1 - turn;
    }
    if (!copies.empty()) follow(stream, staging.up.get());
  }

 private:
  struct Staging {
    Stream up;
    std::array<void*, 2> chunks{};
  };

  std::array<Staging, 2> staging_;
};

}  // namespace

std::unique_ptr<EmulatedLink> make_emulated_link(const std::string& name, at::Device device) {
  const DeviceScope scope(device);
  const size_t colon = std::min(name.find(':'), name.size());
  const std::string kind = name.substr(0, colon);
  std::optional<int> number;
  if (colon < name.size()) {
    int value = 0;
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + colon + 1, end, value);
    number = error == std::errc() && stop == end ? value : -1;
  }
  if (kind == "sm-local" && !number) return std::make_unique<SmLocal>();
  if (kind == "ce-local") {
    const int streams = number.value_or(1);
    if (streams == 1 || streams == 2 || streams == 4) return std::make_unique<CeLocal>(streams);
  }
  if (kind == "nccl-self" && number.value_or(1) > 0) return std::make_unique<NcclSelf>(number.value_or(0), device);
  if (kind == "pcie" && !number) return std::make_unique<Pcie>();
  RTP_CHECK_VALUE(false, "Ring.emulated: expected a link of sm-local, ce-local, ce-local:1, ce-local:2, ce-local:4, ",
                  "nccl-self, nccl-self:CTAS or pcie, got ", name);
  return nullptr;
}

}  // namespace rtp
