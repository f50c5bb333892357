// How numbers lie in memory in eight bits, with a scale for each block of them. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace rtp {

inline constexpr int64_t kQuantizeBlock = 128;  // numbers that share a scale
// Blocks with nothing larger are zero: their scale would be inexact.
inline constexpr float kQuantizeLeast = 0x1p-120f;

// Where the float32 scales begin in the bytes of so many numbers: after the values, at a multiple of 4.
constexpr int64_t quantized_scales(int64_t numbers) { return (numbers + 3) / 4 * 4; }

// All of the bytes.
constexpr int64_t quantized_bytes(int64_t numbers) {
  return quantized_scales(numbers) + (numbers + kQuantizeBlock - 1) / kQuantizeBlock * int64_t{sizeof(float)};
}

}  // namespace rtp
