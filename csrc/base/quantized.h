// Memory layout of 8-bit numbers with one scale per block. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace rtp {

inline constexpr int64_t kQuantizeBlock = 128;  // numbers per scale
// A block whose magnitudes are all below this becomes zero: its scale would be inexact.
inline constexpr float kQuantizeLeast = 0x1p-120f;

// Returns the byte offset of the float32 scales: after the values, rounded up to a multiple of 4.
constexpr int64_t quantized_scales(int64_t numbers) { return (numbers + 3) / 4 * 4; }

// Returns the total size in bytes of `numbers` quantized numbers.
constexpr int64_t quantized_bytes(int64_t numbers) {
  return quantized_scales(numbers) + (numbers + kQuantizeBlock - 1) / kQuantizeBlock * int64_t{sizeof(float)};
}

}  // namespace rtp
