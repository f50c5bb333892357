// Access to the NCCL library that torch loaded.
#pragma once

#ifdef RTP_WITH_CUDA

namespace rtp {

// Returns a function that the oldest supported NCCL lacks; null if the loaded library lacks it.
void* find_nccl_function(const char* name);

// The same with a function type: nccl_function<ncclResult_t (*)(int)>("ncclNew").
template <typename Function>
Function nccl_function(const char* name) {
  return reinterpret_cast<Function>(find_nccl_function(name));
}

}  // namespace rtp

#endif  // RTP_WITH_CUDA
