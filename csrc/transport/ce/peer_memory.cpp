#include "transport/ce/peer_memory.h"

#include "device/nccl/windows.h"

namespace rtp {
namespace {

// nccl.h lacks ncclGetPeerDevicePointer, which was added in 2.29.2 and is declared in nccl_device/core.h.
struct WindowFunctions : NcclWindows {
  using PeerPointer = ncclResult_t (*)(void* window, size_t offset, int peer, void** address);

  PeerPointer address = nccl_function<PeerPointer>("ncclGetPeerDevicePointer");
};

}  // namespace

std::optional<std::string> peer_memory_refusal() {
  const WindowFunctions windows;
  if (windows.complete() && windows.address != nullptr) return std::nullopt;
  return concat("it needs ncclGetPeerDevicePointer of NCCL 2.29.2, but torch loaded NCCL ", nccl_loaded_version_name());
}

PeerRegion PeerMemory::share(const at::Tensor& memory) const {
  const WindowFunctions windows;
  PeerRegion region{memory, nullptr, {}};
  region.window = communicators_.receive(0, "the registration of memory", [&](ncclComm_t comm, void** window) {
    RTP_NCCL_CHECK(windows.enter(comm, memory.data_ptr(), memory.nbytes(), window, NcclWindows::kAddresses));
  });
  // NCCL returns success without a window if the ranks cannot access each other's memory.
  if (region.window == nullptr) {
    throw RotationError(
        "NCCL gave no window: a pair of GPUs lacks direct access, or NCCL_CUMEM_ENABLE or NCCL_WIN_ENABLE is 0");
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    void* base = memory.data_ptr();  // NCCL may return another address for this rank's own memory
    if (peer != rank_) RTP_NCCL_CHECK(windows.address(region.window, 0, peer, &base));
    if (base == nullptr) {
      withdraw(region);
      throw RotationError(concat("the GPU of rank ", rank_, " has no direct access to that of rank ", peer));
    }
    region.bases.push_back(static_cast<std::byte*>(base));
  }
  return region;
}

void PeerMemory::withdraw(PeerRegion& region) const {
  if (region.window == nullptr) return;
  communicators_.call(0, "the end of a registration", [&](ncclComm_t comm) {
    RTP_NCCL_CHECK(WindowFunctions().leave(comm, std::exchange(region.window, nullptr)));
  });
}

}  // namespace rtp
