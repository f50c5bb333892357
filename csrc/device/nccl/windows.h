// NCCL's symmetric windows: memory that all ranks register together and that peers can access.
#pragma once

#ifdef RTP_WITH_CUDA

#include <nccl.h>

#include "device/nccl/library.h"

namespace rtp {

// Available since NCCL 2.27, so not in every header. Windows are opaque pointers; NCCL returns success with a null
// window if the ranks cannot access each other's memory.
struct NcclWindows {
  using Register = ncclResult_t (*)(ncclComm_t, void* memory, size_t bytes, void** window, int flags);
  using Deregister = ncclResult_t (*)(ncclComm_t, void* window);

  static constexpr int kAddresses = 0;  // NCCL_WIN_DEFAULT: addresses of the peers only

  Register enter = nccl_function<Register>("ncclCommWindowRegister");
  Deregister leave = nccl_function<Deregister>("ncclCommWindowDeregister");

  bool complete() const { return enter != nullptr && leave != nullptr; }
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
