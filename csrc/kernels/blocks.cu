#include "kernels/blocks.h"
#include "kernels/common/windows.cuh"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;  // numbers per thread; every block is a multiple of it

// Returns the number of a code of 4 bits, by selections among constants, without memory.
template <BlockFormat kFormat, int kFirst = 0, int kCount = 16>
__device__ float number_of(uint32_t code) {
  if constexpr (kCount == 1) {
    return kCodeNumber<kFormat, kFirst>;
  } else {
    const float low = number_of<kFormat, kFirst, kCount / 2>(code);
    const float high = number_of<kFormat, kFirst + kCount / 2, kCount / 2>(code);
    return (code & (kCount / 2)) != 0 ? high : low;
  }
}

__device__ float scale_of(uint8_t exponent) {
  const uint32_t bits = exponent == 0 ? 0x400000u : exponent == 0xff ? 0x7fc00000u : uint32_t{exponent} << 23;
  float scale;
  memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

// Writes the kWidth numbers that begin at number `place` of a block.
template <BlockFormat kFormat>
__device__ void dequantize_window(float (&values)[kWidth], const uint8_t* block, int64_t place) {
  if constexpr (kFormat == BlockFormat::int8) {
    int8_t codes[kWidth];
    load_words<uint32_t>(codes, reinterpret_cast<const int8_t*>(block) + place);
    const float scale = *reinterpret_cast<const float*>(block + kBlockCodes<kFormat>);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = static_cast<float>(codes[i]) * scale;
  } else {
    uint8_t codes[kWidth / 2];
    float scale;
    if constexpr (kHighFirst<kFormat>) {
      load_words<uint32_t>(codes, block + place / 2);
      scale = *reinterpret_cast<const float*>(block + kBlockCodes<kFormat>);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) codes[i] = block[place / 2 + i];
      scale = scale_of(block[kBlockCodes<kFormat>]);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const bool high = (i % 2 == 0) == kHighFirst<kFormat>;
      const uint32_t code = high ? codes[i / 2] >> 4 : codes[i / 2] & 15;
      values[i] = number_of<kFormat>(code) * scale;
    }
  }
}

template <typename T, BlockFormat kFormat>
__global__ void dequantize_blocks(DequantizeBlocksParameters parameters) {
  T* const out = static_cast<T*>(parameters.out);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t first = thread * kWidth; first < parameters.numbers; first += threads * kWidth) {
    float values[kWidth];
    const uint8_t* const block = parameters.blocks + first / kBlockNumbers<kFormat> * kBlockBytes<kFormat>;
    dequantize_window<kFormat>(values, block, first % kBlockNumbers<kFormat>);
    store_floats<kWidth>(out, first, parameters.numbers, values);
  }
}

template <typename T>
int launch_to(const DequantizeBlocksParameters& parameters, void* stream) {
  const LaunchShape shape = block_launch(divide_up(parameters.numbers, int64_t{kThreads} * kWidth), kThreads);
  switch (parameters.format) {
    case BlockFormat::nf4:
      return launch(dequantize_blocks<T, BlockFormat::nf4>, shape, stream, parameters);
    case BlockFormat::mxfp4:
      return launch(dequantize_blocks<T, BlockFormat::mxfp4>, shape, stream, parameters);
    case BlockFormat::int8:
      return launch(dequantize_blocks<T, BlockFormat::int8>, shape, stream, parameters);
    case BlockFormat::fp4:
      return launch(dequantize_blocks<T, BlockFormat::fp4>, shape, stream, parameters);
    case BlockFormat::nf4_torchao:
      return launch(dequantize_blocks<T, BlockFormat::nf4_torchao>, shape, stream, parameters);
    case BlockFormat::nf4_torchao_bfloat16:
      return launch(dequantize_blocks<T, BlockFormat::nf4_torchao_bfloat16>, shape, stream, parameters);
  }
  return 0;
}

}  // namespace

int launch_dequantize_blocks(const DequantizeBlocksParameters& parameters, void* stream) {
  if (parameters.numbers == 0) return 0;
  switch (parameters.type) {
    case Element::float32:
      return launch_to<float>(parameters, stream);
    case Element::bfloat16:
      return launch_to<__nv_bfloat16>(parameters, stream);
    case Element::float16:
      return launch_to<__half>(parameters, stream);
  }
  return 0;
}

}  // namespace rtp
