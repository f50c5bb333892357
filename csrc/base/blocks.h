// Formats of frozen weights: blocks of numbers in the order of memory, each with its codes and then its scale. No
// torch, no CUDA.
#pragma once

#include <cstdint>
#include <numeric>

namespace rtp {

// nf4: 64 codes of 4 bits, the first of two in the high bits, and the largest magnitude as float32 (bitsandbytes).
// mxfp4: 32 codes of 4 bits (e2m1), the first of two in the low bits, and an exponent of 8 bits (e8m0; OCP MX).
// int8: 128 codes of 8 bits and a float32 scale, with the values of base/quantized.h.
// fp4: as nf4, with the numbers of bitsandbytes' fp4. nf4_torchao, nf4_torchao_bfloat16: as nf4, with the numbers of
// torchao's NF4Tensor of float32 or bfloat16, which have four digits.
enum class BlockFormat : uint8_t { nf4, mxfp4, int8, fp4, nf4_torchao, nf4_torchao_bfloat16 };

struct BlockLayout {
  int64_t numbers;  // numbers in a block
  int64_t codes;    // bytes of their codes; the scale follows
  int64_t bytes;    // bytes of a block
};

constexpr BlockLayout block_layout(BlockFormat format) {
  switch (format) {
    case BlockFormat::mxfp4:
      return {32, 16, 17};
    case BlockFormat::int8:
      return {128, 128, 132};
    default:
      return {64, 32, 36};
  }
}

// The same as constants for kernels, which cannot call the function.
template <BlockFormat kFormat>
inline constexpr int64_t kBlockNumbers = block_layout(kFormat).numbers;
template <BlockFormat kFormat>
inline constexpr int64_t kBlockCodes = block_layout(kFormat).codes;
template <BlockFormat kFormat>
inline constexpr int64_t kBlockBytes = block_layout(kFormat).bytes;
// Whether the first of two codes of 4 bits has the high bits of their byte.
template <BlockFormat kFormat>
inline constexpr bool kHighFirst = kFormat != BlockFormat::mxfp4;

// Returns the bytes of `numbers` numbers; the last block may hold fewer, and has all its bytes.
constexpr int64_t block_bytes(BlockFormat format, int64_t numbers) {
  const BlockLayout layout = block_layout(format);
  return (numbers + layout.numbers - 1) / layout.numbers * layout.bytes;
}

// Returns the smallest number of rows of `row_numbers` numbers that fill whole blocks. Shards are cut between such
// rows.
constexpr int64_t rows_of_blocks(BlockFormat format, int64_t row_numbers) {
  const int64_t numbers = block_layout(format).numbers;
  return row_numbers == 0 ? 1 : numbers / std::gcd(numbers, row_numbers);
}

// The numbers of the codes, before the multiplication with the scale. nf4: quantiles of a normal distribution, QLoRA
// (arXiv 2305.14314), appendix E.
inline constexpr float kNf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
inline constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
inline constexpr float kFp4[16] = {
    0.0f, 1.0f / 192,  2.0f / 3,  1.0f,  1.0f / 3,  0.5f,  1.0f / 6,  0.25f,
    0.0f, -1.0f / 192, -2.0f / 3, -1.0f, -1.0f / 3, -0.5f, -1.0f / 6, -0.25f,
};
inline constexpr float kNf4Torchao[16] = {
    -1.0f,   -0.6962f, -0.5251f, -0.3949f, -0.2844f, -0.1848f, -0.0911f, 0.0f,
    0.0796f, 0.1609f,  0.2461f,  0.3379f,  0.4407f,  0.5626f,  0.7230f,  1.0f,
};
// kNf4Torchao, rounded to bfloat16.
inline constexpr float kNf4TorchaoBfloat16[16] = {
    -1.0f,          -0.6953125f,   -0.5234375f, -0.39453125f, -0.28515625f, -0.1845703125f, -0.09130859375f, 0.0f,
    0.07958984375f, 0.1611328125f, 0.24609375f, 0.337890625f, 0.44140625f,  0.5625f,        0.72265625f,     1.0f,
};

// Returns the numbers of the 16 codes of a format whose codes have 4 bits.
constexpr const float* code_numbers(BlockFormat format) {
  switch (format) {
    case BlockFormat::mxfp4:
      return kE2m1;
    case BlockFormat::fp4:
      return kFp4;
    case BlockFormat::nf4_torchao:
      return kNf4Torchao;
    case BlockFormat::nf4_torchao_bfloat16:
      return kNf4TorchaoBfloat16;
    default:
      return kNf4;
  }
}

// The same as a constant for kernels.
template <BlockFormat kFormat, int kCode>
inline constexpr float kCodeNumber = code_numbers(kFormat)[kCode];

}  // namespace rtp
