// NCCL's symmetric windows: memory of all ranks, registered together, that a rank can name in its peers.
#pragma once

#ifdef RTP_WITH_CUDA

#include <nccl.h>

#include "device/nccl/library.h"

namespace rtp {

// Since NCCL 2.27, and so not in every header. Windows are opaque pointers; one that stays null is how NCCL says that
// the ranks cannot address each other's memory.
struct NcclWindows {
  using Register = ncclResult_t (*)(ncclComm_t, void* memory, size_t bytes, void** window, int flags);
  using Deregister = ncclResult_t (*)(ncclComm_t, void* window);

  static constexpr int kAddresses = 0;  // NCCL_WIN_DEFAULT: peers' addresses, nothing more
  // NCCL_WIN_COLL_SYMMETRIC: what NCCL's own kernels, puts and signals need, multicast among it.
  static constexpr int kSymmetric = 1;

  Register enter = nccl_function<Register>("ncclCommWindowRegister");
  Deregister leave = nccl_function<Deregister>("ncclCommWindowDeregister");

  bool complete() const { return enter != nullptr && leave != nullptr; }
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
