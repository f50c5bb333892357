// Numbers in eight bits with a scale for each block, and sums in float32 of what has fewer bits. Plain pointers.
#pragma once

#include <cstdint>

#include "kernels/elements.h"

namespace rtp {

constexpr int64_t kQuantiseBlock = 128;      // numbers that share a scale
constexpr float kQuantiseLeast = 0x1p-120f;  // blocks with nothing larger are zero: their scale would be inexact

// Where the scales begin in the bytes of so many numbers: after the values, at a multiple of 4.
constexpr int64_t quantised_scales(int64_t numbers) { return (numbers + 3) / 4 * 4; }

struct QuantiseParameters {
  Element type;  // of the values
  int64_t numbers;
  const void* values;
  void* bytes;  // at a multiple of 4
};

struct DequantiseParameters {
  Element type;  // of `out`
  int64_t numbers;
  const void* bytes;
  void* out;
  bool add;  // to what is there, instead of overwriting it
};

struct AddWidenedParameters {
  Element type;  // of the values: 16 bits
  int64_t numbers;
  const void* values;
  float* sum;
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_quantise(const QuantiseParameters& parameters, void* stream);
int launch_dequantise(const DequantiseParameters& parameters, void* stream);
int launch_add_widened(const AddWidenedParameters& parameters, void* stream);

}  // namespace rtp
