// Codes and scales of 8-bit floating-point operands: see base/codes.h. Raw pointers only. The results are bitwise equal
// to those of compute/codes.cpp on a CPU: no product is an operand of a sum.
#pragma once

#include <cstdint>

#include "base/codes.h"
#include "kernels/common/elements.h"

namespace rtp {

struct CodeMatrix {
  Element type;  // type of the values
  int64_t rows, columns;
  const void* values;
  int64_t stride;                     // of the rows
  int64_t block_rows, block_columns;  // columns: 1, a multiple of 32, or at least those of the matrix
  float* amax;                        // one a block, in the order of rows; nullptr: see finds_amax
};

struct CodesParameters {
  CodeMatrix matrix;
  CodeFormat format;
  ScaleRule rule;
  uint8_t* codes;
  int64_t row_stride, column_stride;  // of the codes; one of them is 1
  void* scales;                       // float, or uint8_t for the rules with exponents
  ScalePlaces places;
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
// Raises matrix.amax, which begins as zeros.
int launch_block_amax(const CodeMatrix& matrix, void* stream);
int launch_quantize_codes(const CodesParameters& parameters, void* stream);

// Whether launch_quantize_codes reads the values once and needs no matrix.amax: it finds the largest magnitudes itself.
bool finds_amax(const CodesParameters& parameters);

}  // namespace rtp
