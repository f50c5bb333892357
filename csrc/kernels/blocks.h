// Dequantization of frozen weights in blocks: see base/blocks.h. Raw pointers only. The results are bitwise equal to
// those of compute/frozen_blocks.cpp on a CPU: one product each.
#pragma once

#include <cstdint>

#include "base/blocks.h"
#include "kernels/common/elements.h"

namespace rtp {

struct DequantizeBlocksParameters {
  Element type;  // type of `out`
  BlockFormat format;
  int64_t numbers;
  const uint8_t* blocks;  // aligned to 4 bytes, except mxfp4
  void* out;
};

// Enqueues on `stream` (a cudaStream_t). Returns the cudaError_t of the launch.
int launch_dequantize_blocks(const DequantizeBlocksParameters& parameters, void* stream);

}  // namespace rtp
