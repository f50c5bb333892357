// Bits of float32 numbers, for loops on a CPU and for kernels. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <cstring>

// For rules that CPUs and GPUs share. On a CPU they are inlined into the loops of compute/vectorised.h.
#ifdef __CUDACC__
#define RTP_RULE __host__ __device__ inline
#else
#define RTP_RULE [[gnu::always_inline]] inline
#endif

namespace rtp {

inline constexpr uint32_t kMagnitudeBits = 0x7fffffff, kInfinityBits = 0x7f800000, kNanBits = 0x7fc00000;

RTP_RULE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
RTP_RULE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace rtp
