// Device memory that all ranks can access: NCCL windows provide the addresses, this package the copies.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "device/nccl/communicators.h"

namespace rtp {

// Returns why this process cannot share memory with its peers; nothing if no local reason is known.
std::optional<std::string> peer_memory_refusal();

// One allocation of the same size on every rank.
struct PeerRegion {
  at::Tensor memory;              // memory of this rank
  void* window = nullptr;         // an ncclWindow_t; null after withdraw()
  std::vector<std::byte*> bases;  // by rank: base address in this rank's address space
};

class PeerMemory {
 public:
  // `communicators`: a single communicator of all ranks, used only to register and deregister regions.
  PeerMemory(NcclCommunicators& communicators, int rank, int ranks)
      : communicators_(communicators), rank_(rank), ranks_(ranks) {}

  // Makes `memory` (from allocate_symmetric) accessible to all ranks. Collective, in the same order on every rank.
  // Throws RotationError if a rank cannot access the memory of another one; then no rank can use regions.
  PeerRegion share(const at::Tensor& memory) const;
  // Ends a region on this rank. Its memory may be freed once all copies have ended.
  void withdraw(PeerRegion& region) const;

 private:
  NcclCommunicators& communicators_;
  int rank_;
  int ranks_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
