// Conversions between floating-point types for loops of `vectorised`.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "base/bits.h"
#include "compute/vectorised.h"

namespace rtp {

RTP_INLINE float to_float(float x) { return x; }
RTP_INLINE float to_float(double x) { return static_cast<float>(x); }
RTP_INLINE float to_float(c10::Half x) { return static_cast<float>(x); }
RTP_INLINE float to_float(c10::BFloat16 x) { return float_of(static_cast<uint32_t>(x.x) << 16); }

RTP_INLINE void round_to(float& to, float x) { to = x; }
RTP_INLINE void round_to(double& to, float x) { to = x; }
RTP_INLINE void round_to(c10::Half& to, float x) { to = c10::Half(x); }
// Rounds to nearest, ties to even. The argument is finite or NaN.
RTP_INLINE void round_to(c10::BFloat16& to, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.x = static_cast<uint16_t>((bits & kMagnitudeBits) > kInfinityBits ? 0x7fc0 : rounded);
}

}  // namespace rtp
