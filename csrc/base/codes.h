// Rules of 8-bit floating-point operands: the scale of a block of numbers by its largest magnitude, and the codes of
// the numbers. One source for CPUs and GPUs. No torch, no CUDA.
#pragma once

#include <cstdint>

#include "base/bits.h"

namespace rtp {

// e4m3: float8_e4m3fn, without infinities, at most 448. e5m2: float8_e5m2, at most 57344.
enum class CodeFormat : int32_t { e4m3, e5m2 };

// A number x of a block with the largest magnitude m becomes the code of x * f, saturated and rounded to the nearest,
// ties to even; the product takes the scale, about 1 / f. M is the largest number of the format.
//
// linear: f = M / max(m, 1e-12) in float32, scale 1 / f. power_of_two: the largest power of two that is at most this f
// (see power_of_two_below). With either, a block with an infinity or a NaN has the scale NaN, and all its codes are
// NaN. e8m0_floor: the scale is 2^(floor(log2 m) - floor(log2 M)), a byte with the exponent + 127; f is its inverse, at
// most 2^126. e8m0_ceil: the least power of two that is at least m / M; f is its inverse, and 1 where the byte is 0.
// With either, infinities saturate, and a block with a NaN has the byte 255, and all its codes are NaN.
enum class ScaleRule : int32_t { linear, power_of_two, e8m0_floor, e8m0_ceil };

struct CodeShape {
  int mantissa, bias;
  float largest, least_normal;
  float to_subnormal;  // adding it to a smaller magnitude leaves the subnormal code in the low bits
};

template <CodeFormat kFormat>
inline constexpr CodeShape kCodeShape = kFormat == CodeFormat::e4m3 ? CodeShape{3, 7, 448.0f, 0x1p-6f, 0x1p14f}
                                                                    : CodeShape{2, 15, 57344.0f, 0x1p-14f, 0x1p7f};

RTP_RULE constexpr bool has_exponents(ScaleRule rule) {
  return rule == ScaleRule::e8m0_floor || rule == ScaleRule::e8m0_ceil;
}

// Returns the code of value * factor; a NaN keeps the sign of `value`.
template <CodeFormat kFormat>
RTP_RULE uint8_t code_of(float value, float factor) {
  constexpr CodeShape kShape = kCodeShape<kFormat>;
  constexpr int kShift = 23 - kShape.mantissa;
  const uint32_t exact = bits_of(value * factor) & kMagnitudeBits;
  const float limited = float_of(exact) < kShape.largest ? float_of(exact) : kShape.largest;
  const uint32_t bits = bits_of(limited);
  const uint32_t rounded = (bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1)) >> kShift;
  const uint32_t normal = rounded - (static_cast<uint32_t>(127 - kShape.bias) << kShape.mantissa);
  const uint32_t subnormal = bits_of(limited + kShape.to_subnormal) - bits_of(kShape.to_subnormal);
  const uint32_t finite = limited < kShape.least_normal ? subnormal : normal;
  const uint32_t magnitude = exact > kInfinityBits ? 0x7fu : finite;
  return static_cast<uint8_t>(magnitude | ((bits_of(value) >> 24) & 0x80u));
}

struct BlockScale {
  float factor;      // of the numbers
  float scale;       // of the codes
  uint8_t exponent;  // of the scale, for the rules that have exponents
};

// Returns 2^floor(log2 x) of a normal number, with the logarithm rounded to float32: a number that is so little below a
// power of two that its logarithm rounds to a whole number becomes that power, as torchao's does.
RTP_RULE float power_of_two_below(float x) {
  const uint32_t bits = bits_of(x);
  const int32_t above = static_cast<int32_t>(bits >> 23) - 126;  // the exponent of the next power of two
  const int32_t size = above > 0 ? above - 1 : -above;
  const uint32_t steps = size >= 64 ? 44 : size >= 32 ? 22 : size >= 16 ? 11 : size >= 8 ? 5 : size >= 4 ? 2 : size / 2;
  const bool rounded = 0x800000u - (bits & 0x7fffffu) <= steps;
  return float_of((bits & kInfinityBits) + (rounded ? 0x800000u : 0));
}

RTP_RULE BlockScale float_scale(float largest, float amax, bool power_of_two) {
  static_assert(static_cast<double>(1e-12f) < 1e-12, "a float32 above 1e-12f is above 1e-12");
  if (!(amax < float_of(kInfinityBits))) return {float_of(kNanBits), float_of(kNanBits), 0};
  // One rounding of the exact quotient, as of a quotient in float64 that is then rounded to float32.
  float factor = amax > 1e-12f ? largest / amax : static_cast<float>(static_cast<double>(largest) / 1e-12);
  if (power_of_two) factor = power_of_two_below(factor);
  return {factor, 1.0f / factor, 0};
}

// Returns 2^(127 - exponent), for exponents from 1 to 254.
RTP_RULE float inverse_of_exponent(uint32_t exponent) {
  return exponent < 254 ? float_of((254 - exponent) << 23) : float_of(0x400000u);
}

RTP_RULE BlockScale exponent_scale(float largest, float amax, bool ceil) {
  const uint32_t bits = bits_of(amax);
  if (bits > kInfinityBits) return {float_of(kNanBits), 0.0f, 255};
  if (!ceil) {
    const uint32_t most = (bits_of(largest) >> 23) - 127;
    const uint32_t exponent = bits >> 23 > most ? (bits >> 23) - most : 0;
    return {inverse_of_exponent(exponent > 0 ? exponent : 1), 0.0f, static_cast<uint8_t>(exponent)};
  }
  if (bits == kInfinityBits) return {inverse_of_exponent(254), 0.0f, 254};
  const uint32_t quotient = bits_of(amax / largest);
  const bool normal = quotient >> 23 > 0;  // of the subnormal numbers, those up to 2^-127 have the exponent 0
  const bool above = (normal ? quotient & 0x7fffffu : quotient) > (normal ? 0u : 0x400000u);
  const uint32_t exponent = (quotient >> 23) + (above ? 1 : 0);
  return {exponent > 0 ? inverse_of_exponent(exponent) : 1.0f, 0.0f, static_cast<uint8_t>(exponent)};
}

template <CodeFormat kFormat>
RTP_RULE BlockScale scale_of(ScaleRule rule, float amax) {
  constexpr float kLargest = kCodeShape<kFormat>.largest;
  if (has_exponents(rule)) return exponent_scale(kLargest, amax, rule == ScaleRule::e8m0_ceil);
  return float_scale(kLargest, amax, rule == ScaleRule::power_of_two);
}

// The layout of e8m0 scales that cuBLAS takes: tiles of 128 rows x 4 columns, each of 512 bytes.
constexpr int64_t swizzled_bytes(int64_t rows, int64_t columns) {
  return (rows + 127) / 128 * ((columns + 3) / 4) * 512;
}
RTP_RULE int64_t swizzled_place(int64_t row, int64_t column, int64_t columns) {
  const int64_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

// Where the scale of a block lies: with strides, or swizzled, perhaps as that of the transposed matrix of blocks.
struct ScalePlaces {
  int64_t row_stride, column_stride;
  int64_t swizzled_columns;  // 0: strides
  bool transposed;
};
RTP_RULE int64_t scale_place(const ScalePlaces& places, int64_t row, int64_t column) {
  if (places.swizzled_columns == 0) return row * places.row_stride + column * places.column_stride;
  return places.transposed ? swizzled_place(column, row, places.swizzled_columns)
                           : swizzled_place(row, column, places.swizzled_columns);
}

}  // namespace rtp
