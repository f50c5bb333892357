// Dequantization of frozen weights in blocks: see base/blocks.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/blocks.h"

namespace rtp {

// out = the numbers of `blocks`, each the product of its code's number and the scale of its block in float32, rounded
// to the dtype of `out`: bitwise equal on every processor and GPU, except for the bits of NaNs.
//
// `out`: contiguous, float32, bfloat16, float16 or float64. `blocks`: uint8, contiguous, block_bytes(format, numbers)
// long, on the device of `out`; on a GPU aligned to 4 bytes.
void dequantize_blocks(const at::Tensor& out, const at::Tensor& blocks, BlockFormat format);

}  // namespace rtp
