#include <cuda_runtime_api.h>

#include "kernels/delay.h"

namespace rtp {
namespace {

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void hold_up(uint64_t duration) {
  const uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) __nanosleep(1000);
}

}  // namespace

int launch_delay(int64_t microseconds, void* stream) {
  if (microseconds <= 0) return cudaSuccess;
  hold_up<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<uint64_t>(microseconds) * 1000);
  return cudaGetLastError();
}

}  // namespace rtp
