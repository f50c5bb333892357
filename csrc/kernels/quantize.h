// Numbers in eight bits with a scale for each block, and sums in float32 of what has fewer bits. Plain pointers. The
// bytes are those of compute/quantize.cpp on a CPU, for which the build keeps products and sums apart (CMakeLists.txt).
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

struct QuantizeParameters {
  Element type;  // of the values
  int64_t numbers;
  const void* values;
  int8_t* rounded;  // at a multiple of 4
  float* scales;    // of every kQuantizeBlock of them
};

struct DequantizeParameters {
  Element type;  // of `out`
  int64_t numbers;
  const int8_t* rounded;
  const float* scales;
  void* out;
  bool add;  // to what is there, instead of overwriting it
};

struct AddConvertedParameters {
  Element type;  // of the values: 16 bits
  int64_t numbers;
  const void* values;
  float* sum;
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_quantize(const QuantizeParameters& parameters, void* stream);
int launch_dequantize(const DequantizeParameters& parameters, void* stream);
int launch_add_converted(const AddConvertedParameters& parameters, void* stream);

}  // namespace rtp
