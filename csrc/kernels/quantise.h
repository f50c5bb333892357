// Numbers in eight bits with a scale for each block, and sums in float32 of what has fewer bits. Plain pointers. The
// bytes are those of compute/quantise.cpp on a CPU, for which the build keeps products and sums apart (CMakeLists.txt).
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

struct QuantiseParameters {
  Element type;  // of the values
  int64_t numbers;
  const void* values;
  int8_t* rounded;  // at a multiple of 4
  float* scales;    // of every kQuantiseBlock of them
};

struct DequantiseParameters {
  Element type;  // of `out`
  int64_t numbers;
  const int8_t* rounded;
  const float* scales;
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
