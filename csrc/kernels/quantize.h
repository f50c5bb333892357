// 8-bit quantization with one scale per block, and float32 sums. Raw pointers only. The results are
// bitwise equal to those of compute/quantize.cpp on a CPU; the build therefore does not contract products and sums
// (CMakeLists.txt).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

struct QuantizeParameters {
  Element type;  // type of the values
  int64_t numbers;
  const void* values;
  int8_t* rounded;  // aligned to 4 bytes
  float* scales;    // one per kQuantizeBlock values
};

struct DequantizeParameters {
  Element type;  // type of `out`
  int64_t numbers;
  const int8_t* rounded;
  const float* scales;
  void* out;
  bool add;  // accumulate instead of overwrite
};

inline constexpr size_t kMostAddends = 15;

struct Addends {
  int count;
  const void* values[kMostAddends];
};

struct AddConvertedParameters {
  Element type;  // type of the values
  int64_t numbers;
  Addends addends;  // added in this order
  float* sum;
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_quantize(const QuantizeParameters& parameters, void* stream);
int launch_dequantize(const DequantizeParameters& parameters, void* stream);
int launch_add_converted(const AddConvertedParameters& parameters, void* stream);

}  // namespace rtp
