// Stands in for torch's header of this name where the CUDA runtime is simulated.
#pragma once

#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
};

// The stream of the calling thread: see set_compute in simulator.h.
CUDAStream getCurrentCUDAStream(int device = -1);
inline CUDAStream getStreamFromExternal(cudaStream_t stream, int) { return CUDAStream(stream); }
// Without asynchronous computes, torch computes synchronously on any stream.
void setCurrentCUDAStream(CUDAStream stream);

}  // namespace c10::cuda
