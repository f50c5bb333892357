// The NCCL that torch loaded.
#pragma once

#ifdef RTP_WITH_CUDA

namespace rtp {

// A function of the loaded library that the oldest supported one lacks; null where it is lacking.
void* find_nccl_function(const char* name);

// The same with its type: nccl_function<ncclResult_t (*)(int)>("ncclNew").
template <typename Function>
Function nccl_function(const char* name) {
  return reinterpret_cast<Function>(find_nccl_function(name));
}

}  // namespace rtp

#endif  // RTP_WITH_CUDA
