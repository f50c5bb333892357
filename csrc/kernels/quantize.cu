#include "base/bits.h"
#include "base/quantized.h"
#include "kernels/common/windows.cuh"
#include "kernels/quantize.h"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr float kToInteger = 12582912.0f;  // adding it to a float below 2^22 leaves the nearest integer in the low bits

__device__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Calls body(first) for windows of kWidth numbers that begin at `first`, one per thread. All lanes of a warp take part
// in every iteration, including lanes whose window begins after the last number.
template <int kWidth, typename Body>
__device__ void for_windows_of_warps(int64_t numbers, Body&& body) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t lane = thread % kWarp;
  for (int64_t first = (thread - lane) * kWidth; first < numbers; first += threads * kWidth)
    body(first + lane * kWidth);
}

// The lanes that share a block reduce its largest magnitude by shuffles.
template <typename T>
__global__ void quantize(QuantizeParameters parameters) {
  constexpr int kWidth = kWindow<T>;
  constexpr int kLanes = kQuantizeBlock / kWidth;
  const T* const from = static_cast<const T*>(parameters.values);
  for_windows_of_warps<kWidth>(parameters.numbers, [&](int64_t first) {
    float values[kWidth];
    load_floats<kWidth>(values, from, first, parameters.numbers);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) most = larger(most, bits_of(values[i]) & kMagnitudeBits);
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, lanes));
    if (first >= parameters.numbers) return;
    const float largest = float_of(most);
    const bool zero = largest < kQuantizeLeast;
    const bool finite = most < kInfinityBits;
    if (first % kQuantizeBlock == 0) {
      parameters.scales[first / kQuantizeBlock] = finite ? (zero ? 0.0f : largest / 127.0f) : float_of(kNanBits);
    }
    const float inverse = finite && !zero ? 127.0f / largest : 0.0f;
    int8_t rounded[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float whole = finite ? values[i] * inverse : 0.0f;  // avoids infinity * 0, a NaN with unspecified bits
      rounded[i] = static_cast<int8_t>(bits_of(whole + kToInteger) - bits_of(kToInteger));
    }
    if (is_whole(first, kWidth, parameters.numbers)) {
      store_words<uint32_t>(parameters.rounded + first, rounded);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (first + i < parameters.numbers) parameters.rounded[first + i] = rounded[i];
      }
    }
  });
}

template <typename T>
__global__ void dequantize(DequantizeParameters parameters) {
  constexpr int kWidth = kWindow<T>;
  const int8_t* const from = parameters.rounded;
  T* const out = static_cast<T*>(parameters.out);
  for_windows_of_warps<kWidth>(parameters.numbers, [&](int64_t first) {
    if (first >= parameters.numbers) return;
    int8_t rounded[kWidth];
    if (is_whole(first, kWidth, parameters.numbers)) {
      load_words<uint32_t>(rounded, from + first);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) rounded[i] = first + i < parameters.numbers ? from[first + i] : int8_t{0};
    }
    const float scale = parameters.scales[first / kQuantizeBlock];
    float values[kWidth];
    if (parameters.add) {
      load_floats<kWidth>(values, out, first, parameters.numbers);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] += static_cast<float>(rounded[i]) * scale;
    store_floats<kWidth>(out, first, parameters.numbers, values);
  });
}

template <typename T>
__global__ void add_converted(const __grid_constant__ AddConvertedParameters parameters) {
  constexpr int kWidth = kWindow<T>;
  for_windows_of_warps<kWidth>(parameters.numbers, [&](int64_t first) {
    if (first >= parameters.numbers) return;
    float sum[kWidth], values[kWidth];
    load_floats<kWidth>(sum, parameters.sum, first, parameters.numbers);
    for (int k = 0; k < parameters.addends.count; ++k) {
      load_floats<kWidth>(values, static_cast<const T*>(parameters.addends.values[k]), first, parameters.numbers);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += values[i];
    }
    store_floats<kWidth>(parameters.sum, first, parameters.numbers, sum);
  });
}

template <typename T>
LaunchShape shape_of(int64_t numbers) {
  return block_launch(divide_up(numbers, int64_t{kThreads} * kWindow<T>), kThreads);
}

}  // namespace

int launch_quantize(const QuantizeParameters& parameters, void* stream) {
  const int64_t numbers = parameters.numbers;
  if (numbers == 0) return 0;
  switch (parameters.type) {
    case Element::float32:
      return launch(quantize<float>, shape_of<float>(numbers), stream, parameters);
    case Element::bfloat16:
      return launch(quantize<__nv_bfloat16>, shape_of<__nv_bfloat16>(numbers), stream, parameters);
    case Element::float16:
      return launch(quantize<__half>, shape_of<__half>(numbers), stream, parameters);
  }
  return 0;
}

int launch_dequantize(const DequantizeParameters& parameters, void* stream) {
  const int64_t numbers = parameters.numbers;
  if (numbers == 0) return 0;
  switch (parameters.type) {
    case Element::float32:
      return launch(dequantize<float>, shape_of<float>(numbers), stream, parameters);
    case Element::bfloat16:
      return launch(dequantize<__nv_bfloat16>, shape_of<__nv_bfloat16>(numbers), stream, parameters);
    case Element::float16:
      return launch(dequantize<__half>, shape_of<__half>(numbers), stream, parameters);
  }
  return 0;
}

int launch_add_converted(const AddConvertedParameters& parameters, void* stream) {
  const int64_t numbers = parameters.numbers;
  if (numbers == 0) return 0;
  switch (parameters.type) {
    case Element::float32:
      return launch(add_converted<float>, shape_of<float>(numbers), stream, parameters);
    case Element::bfloat16:
      return launch(add_converted<__nv_bfloat16>, shape_of<__nv_bfloat16>(numbers), stream, parameters);
    case Element::float16:
      return launch(add_converted<__half>, shape_of<__half>(numbers), stream, parameters);
  }
  return 0;
}

}  // namespace rtp
