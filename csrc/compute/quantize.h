// 8-bit quantization with one scale per block, and sums of received values that have fewer bits than the sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/quantized.h"

namespace rtp {

// The byte format for n numbers: n int8 values q in memory order, padding to a multiple of 4, then one float32 scale
// per block of kQuantizeBlock numbers (the last block may be shorter). A number is q * scale, where scale = m / 127 and
// m is the largest magnitude of the block; the error is at most m / 254 plus float32 rounding. A block that contains an
// infinity or a NaN becomes NaN: its values are 0 and its scale is NaN. A block with m below 2^-120 becomes zero. Equal
// inputs give bitwise equal outputs on every processor and GPU, except for the padding, which is not written, and the
// bits of NaNs in `out`.
//
// `bytes`: uint8, contiguous, quantized_bytes(numbers) long, aligned to 4 bytes. `values`, `out`: contiguous, float32,
// bfloat16, float16 or float64. All on one device.
void quantize(const at::Tensor& bytes, const at::Tensor& values);
void dequantize(const at::Tensor& out, const at::Tensor& bytes);
// sum += dequantized values.
void dequantize_add(const at::Tensor& sum, const at::Tensor& bytes);

// sum += values[0], then values[1], ...; all of one shape. The values have one dtype, perhaps of fewer bits than the
// sum's; no converted copy is made, and a float32 sum is read and written once.
void add_converted(const at::Tensor& sum, const std::vector<at::Tensor>& values);

}  // namespace rtp
