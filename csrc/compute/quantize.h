// Numbers in eight bits, with a scale for each block of them, and sums of what arrives in fewer bits than they have.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/quantized.h"

namespace rtp {

// A tensor of n numbers in 8 bits, as bytes: n int8 values q in the order of memory, padding to a multiple of 4, and
// the float32 scale of every kQuantizeBlock of them, the last block shorter. A number is q * scale, with scale = m /
// 127 of the largest magnitude m in its block: an error of at most m / 254, but for roundings of float32. A block with
// an infinity or a NaN becomes NaN: its values are 0, its scale a NaN. One whose m is below 2^-120 becomes zero. What
// is the same in is bitwise the same out, on every processor and GPU. Only the padding, which is not written, and the
// bits of NaNs in `out` may differ.
//
// `bytes`: uint8, contiguous, quantized_bytes(numbers) of them, at a multiple of 4. `values`, `out`: contiguous, of
// float32, bfloat16, float16 or float64. All on one device.
void quantize(const at::Tensor& bytes, const at::Tensor& values);
void dequantize(const at::Tensor& out, const at::Tensor& bytes);
// sum += what the bytes stand for.
void dequantize_add(const at::Tensor& sum, const at::Tensor& bytes);

// sum += values, of the same shape, both contiguous. The values may have fewer bits; they are added as they are,
// without a copy.
void add_converted(const at::Tensor& sum, const at::Tensor& values);

}  // namespace rtp
