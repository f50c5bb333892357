// Device memory of every rank that every rank can address: NCCL windows for the addresses, our own copies for the rest.
#pragma once

#ifdef RTP_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "device/nccl/communicators.h"

namespace rtp {

// Why this process cannot share memory with its peers; nothing if it can as far as it knows alone.
std::optional<std::string> peer_memory_refusal();

// One allocation of the same size on every rank.
struct PeerRegion {
  at::Tensor memory;              // this rank's
  void* window = nullptr;         // an ncclWindow_t; null once it is withdrawn
  std::vector<std::byte*> bases;  // where each rank's begins, in this rank's address space
};

class PeerMemory {
 public:
  // `communicators`: one, of all ranks. Used to make and end regions only.
  PeerMemory(NcclCommunicators& communicators, int rank, int ranks)
      : communicators_(communicators), rank_(rank), ranks_(ranks) {}

  // Makes `memory` (of symmetric_memory) addressable by all ranks. Collective, in the same order on every rank. Throws
  // RotationError where a rank cannot reach another one's memory; then no rank can use regions.
  PeerRegion share(const at::Tensor& memory) const;
  // Ends a region on this rank; the memory may be freed once nobody copies any more.
  void withdraw(PeerRegion& region) const;

 private:
  NcclCommunicators& communicators_;
  int rank_;
  int ranks_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
