#include "compute/frozen_blocks.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "base/checks.h"
#include "compute/kernel_tensors.h"
#include "compute/rounding.h"
#include "compute/vectorised.h"
#include "kernels/blocks.h"

namespace rtp {
namespace {

constexpr int64_t kNumbersPerThread = 1 << 15;  // minimum

template <BlockFormat kFormat>
RTP_INLINE float scale_of_block(const uint8_t* block) {
  const uint8_t* const scale = block + block_layout(kFormat).codes;
  if constexpr (kFormat == BlockFormat::mxfp4) {
    return float_of(*scale == 0 ? 0x400000 : *scale == 0xff ? 0x7fc00000 : static_cast<uint32_t>(*scale) << 23);
  } else {
    float read;
    std::memcpy(&read, scale, sizeof read);
    return read;
  }
}

#if defined(__x86_64__) && !defined(__clang__)
#define RTP_SHUFFLES
// The numbers of sixteen codes in registers: one instruction of AVX-512 looks up sixteen codes, a few of AVX2 look up
// eight. The baseline takes a table in memory.
using Floats16 = float __attribute__((vector_size(64)));
using Codes16 = int32_t __attribute__((vector_size(64)));
using Floats8 = float __attribute__((vector_size(32)));
using Codes8 = int32_t __attribute__((vector_size(32)));

template <int kCodes, int kLanes>
RTP_INLINE void look_up(float* values, const float* table, const int32_t* codes) {
  if constexpr (kLanes == 16) {
    Floats16 numbers;
    std::memcpy(&numbers, table, sizeof numbers);
    for (int i = 0; i < kCodes; i += 16) {
      Codes16 some;
      std::memcpy(&some, codes + i, sizeof some);
      const Floats16 found = __builtin_shuffle(numbers, some);
      std::memcpy(values + i, &found, sizeof found);
    }
  } else {
    Floats8 low, high;
    std::memcpy(&low, table, sizeof low);
    std::memcpy(&high, table + 8, sizeof high);
    for (int i = 0; i < kCodes; i += 8) {
      Codes8 some;
      std::memcpy(&some, codes + i, sizeof some);
      const Floats8 found = __builtin_shuffle(low, high, some);
      std::memcpy(values + i, &found, sizeof found);
    }
  }
}
#endif

// Writes the numbers of one block, in float32. `numbers`: those of the codes, if these have 4 bits. kLanes: codes that
// are looked up at once; 0: a table in memory.
template <BlockFormat kFormat, int kLanes>
RTP_INLINE void dequantize_block(float* values, const uint8_t* block, const float* numbers) {
  constexpr BlockLayout kLayout = block_layout(kFormat);
  const float scale = scale_of_block<kFormat>(block);
  if constexpr (kFormat == BlockFormat::int8) {
    for (int64_t i = 0; i < kLayout.numbers; ++i) values[i] = static_cast<float>(static_cast<int8_t>(block[i])) * scale;
  } else {
    float table[16];
    for (int code = 0; code < 16; ++code) table[code] = numbers[code] * scale;
    int32_t high[kLayout.codes], low[kLayout.codes];
    for (int64_t i = 0; i < kLayout.codes; ++i) high[i] = block[i] >> 4, low[i] = block[i] & 15;
    float of_high[kLayout.codes], of_low[kLayout.codes];
#ifdef RTP_SHUFFLES
    if constexpr (kLanes > 0) {
      look_up<kLayout.codes, kLanes>(of_high, table, high);
      look_up<kLayout.codes, kLanes>(of_low, table, low);
    } else
#endif
    {
      for (int64_t i = 0; i < kLayout.codes; ++i) of_high[i] = table[high[i]], of_low[i] = table[low[i]];
    }
    for (int64_t i = 0; i < kLayout.codes; ++i) {
      values[2 * i] = kHighFirst<kFormat> ? of_high[i] : of_low[i];
      values[2 * i + 1] = kHighFirst<kFormat> ? of_low[i] : of_high[i];
    }
  }
}

template <BlockFormat kFormat, int kLanes, typename Value>
RTP_INLINE void dequantize_range(Value* to, const uint8_t* from, const float* codes, int64_t numbers, int64_t first,
                                 int64_t last) {
  constexpr BlockLayout kLayout = block_layout(kFormat);
  float values[kLayout.numbers];
  for (int64_t index = first; index < last; ++index) {
    dequantize_block<kFormat, kLanes>(values, from + index * kLayout.bytes, codes);
    Value* const out = to + index * kLayout.numbers;
    const int64_t count = std::min(numbers - index * kLayout.numbers, kLayout.numbers);
    if (count == kLayout.numbers) {
      for (int64_t i = 0; i < kLayout.numbers; ++i) round_to(out[i], values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) round_to(out[i], values[i]);
    }
  }
}

// The number of codes that are looked up at once, by what took the least time on an AMD EPYC.
template <BlockFormat kFormat>
inline constexpr int kLanesOfAvx512 = kFormat == BlockFormat::mxfp4 ? 16 : 8;
template <BlockFormat kFormat>
inline constexpr int kLanesOfAvx2 = kFormat == BlockFormat::mxfp4 ? 0 : 8;

// `codes`: the numbers of the codes of a format with the layout of kFormat.
template <BlockFormat kFormat>
void dequantize_on_cpu(const at::Tensor& out, const uint8_t* from, const float* codes) {
  constexpr BlockLayout kLayout = block_layout(kFormat);
  const int64_t numbers = out.numel();
  const int64_t blocks = (numbers + kLayout.numbers - 1) / kLayout.numbers;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "dequantize_blocks", [&] {
    auto* to = out.data_ptr<scalar_t>();
    at::parallel_for(0, blocks, kNumbersPerThread / kLayout.numbers, [&](int64_t first, int64_t last) {
#ifdef RTP_SHUFFLES
      if (instruction_set() == InstructionSet::avx512) {
        return run_with_avx512([=]() RTP_INLINE_LAMBDA {
          dequantize_range<kFormat, kLanesOfAvx512<kFormat>>(to, from, codes, numbers, first, last);
        });
      }
      if (instruction_set() == InstructionSet::avx2) {
        return run_with_avx2([=]() RTP_INLINE_LAMBDA {
          dequantize_range<kFormat, kLanesOfAvx2<kFormat>>(to, from, codes, numbers, first, last);
        });
      }
#endif
      vectorised([=]() RTP_INLINE_LAMBDA { dequantize_range<kFormat, 0>(to, from, codes, numbers, first, last); });
    });
  });
}

}  // namespace

void dequantize_blocks(const at::Tensor& out, const at::Tensor& blocks, BlockFormat format) {
  const int64_t expected = block_bytes(format, out.numel());
  RTP_CHECK_TYPE(blocks.scalar_type() == at::kByte, "expected blocks in uint8, got ", blocks.scalar_type());
  RTP_CHECK_VALUE(out.is_contiguous() && blocks.is_contiguous() && blocks.numel() == expected,
                  "expected contiguous values, and ", expected, " contiguous bytes for ", out.numel(),
                  " numbers in blocks, got ", blocks.numel());
  RTP_CHECK_VALUE(out.device() == blocks.device(), "expected values and blocks on one device, got ", out.device().str(),
                  " and ", blocks.device().str());
  if (out.numel() == 0) return;
  const auto* from = static_cast<const uint8_t*>(blocks.const_data_ptr());
#ifdef RTP_WITH_CUDA
  if (out.is_cuda()) {
    const auto element = element_of(out.scalar_type());
    RTP_CHECK_TYPE(element.has_value(), "expected float32, bfloat16 or float16 for blocks on a GPU, got ",
                   out.scalar_type());
    RTP_CHECK_VALUE(reinterpret_cast<uintptr_t>(from) % alignof(float) == 0, "expected blocks at a multiple of ",
                    alignof(float), " bytes");
    const DequantizeBlocksParameters parameters{*element, format, out.numel(), from, out.data_ptr()};
    return launch_on_device_of(out, [&](void* stream) { return launch_dequantize_blocks(parameters, stream); });
  }
#endif
  const float* const codes = code_numbers(format);
  switch (format) {
    case BlockFormat::mxfp4:
      return dequantize_on_cpu<BlockFormat::mxfp4>(out, from, codes);
    case BlockFormat::int8:
      return dequantize_on_cpu<BlockFormat::int8>(out, from, codes);
    default:
      return dequantize_on_cpu<BlockFormat::nf4>(out, from, codes);
  }
}

}  // namespace rtp
