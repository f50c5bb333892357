#include "compute/quantize.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/checks.h"
#include "compute/kernel_tensors.h"
#include "compute/rounding.h"
#include "compute/vectorised.h"
#include "kernels/quantize.h"

namespace rtp {
namespace {

constexpr int64_t kGrain = 256;  // minimum number of blocks per thread
// Adding this to a float of magnitude below 2^22 leaves the nearest integer in the low bits of the sum.
constexpr float kToInteger = 12582912.0f;

// Quantizes the blocks [first, last) of `numbers` values.
template <typename Value>
RTP_INLINE void quantize_blocks(int8_t* to, float* scales, const Value* from, int64_t numbers, int64_t first,
                                int64_t last) {
  float block[kQuantizeBlock];
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * kQuantizeBlock;
    const int64_t count = std::min(numbers - begin, kQuantizeBlock);
    if (count < kQuantizeBlock) std::fill(block, block + kQuantizeBlock, 0.0f);
    if (count == kQuantizeBlock) {
      for (int64_t i = 0; i < kQuantizeBlock; ++i) block[i] = to_float(from[begin + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) block[i] = to_float(from[begin + i]);
    }
    uint32_t most = 0;  // magnitudes compare like their bits; infinities and NaNs compare greater than all others
    for (int64_t i = 0; i < kQuantizeBlock; ++i) {
      const uint32_t magnitude = bits_of(block[i]) & kMagnitudeBits;
      most = magnitude > most ? magnitude : most;
    }
    const float largest = float_of(most);
    const bool finite = most < kInfinityBits;
    const bool zero = finite && largest < kQuantizeLeast;
    scales[index] = finite ? (zero ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    const float inverse = finite && !zero ? 127.0f / largest : 0.0f;
    int8_t rounded[kQuantizeBlock];
    for (int64_t i = 0; i < kQuantizeBlock; ++i) {
      const float whole = finite ? block[i] * inverse : 0.0f;  // avoids infinity * 0, a NaN with unspecified bits
      rounded[i] = static_cast<int8_t>(bits_of(whole + kToInteger) - bits_of(kToInteger));
    }
    std::memcpy(to + begin, rounded, static_cast<size_t>(count));
  }
}

template <bool kAdd, typename Value>
RTP_INLINE void dequantize_blocks(Value* to, const int8_t* from, const float* scales, int64_t numbers, int64_t first,
                                  int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * kQuantizeBlock;
    const int64_t count = std::min(numbers - begin, kQuantizeBlock);
    const float scale = scales[index];
    const auto each = [&](int64_t i) __attribute__((always_inline)) {
      const float value = static_cast<float>(from[begin + i]) * scale;
      if constexpr (kAdd) {
        round_to(to[begin + i], to_float(to[begin + i]) + value);
      } else {
        round_to(to[begin + i], value);
      }
    };
    if (count == kQuantizeBlock) {
      for (int64_t i = 0; i < kQuantizeBlock; ++i) each(i);
    } else {
      for (int64_t i = 0; i < count; ++i) each(i);
    }
  }
}

RTP_INLINE void add_blocks(float* to, const int8_t* from, const float* scales, int64_t numbers, int64_t first,
                           int64_t last) {
  dequantize_blocks<true>(to, from, scales, numbers, first, last);
}
// Adds to float64 sums without rounding them to float32.
RTP_INLINE void add_blocks(double* to, const int8_t* from, const float* scales, int64_t numbers, int64_t first,
                           int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * kQuantizeBlock, end = std::min(numbers, begin + kQuantizeBlock);
    const float scale = scales[index];
    for (int64_t i = begin; i < end; ++i) to[i] += static_cast<float>(from[i]) * scale;
  }
}

// Tiles that stay in the first-level cache: sums are read from and written to memory once.
template <typename Value>
RTP_INLINE void add_converted_range(float* sum, const Addends& from, int64_t first, int64_t last) {
  constexpr int64_t kTile = 2048;
  for (int64_t begin = first; begin < last; begin += kTile) {
    const int64_t end = std::min(begin + kTile, last);
    for (int k = 0; k < from.count; ++k) {
      const auto* values = static_cast<const Value*>(from.values[k]);
      for (int64_t i = begin; i < end; ++i) sum[i] += to_float(values[i]);
    }
  }
}

void check(const at::Tensor& values, const at::Tensor& bytes) {
  RTP_CHECK_TYPE(bytes.scalar_type() == at::kByte, "expected quantized numbers in uint8, got ", bytes.scalar_type());
  RTP_CHECK_VALUE(values.is_contiguous() && bytes.is_contiguous() && bytes.numel() == quantized_bytes(values.numel()),
                  "expected contiguous values, and ", quantized_bytes(values.numel()), " contiguous bytes for ",
                  values.numel(), " numbers, got ", bytes.numel());
  RTP_CHECK_VALUE(values.device() == bytes.device(), "expected values and bytes on one device, got ",
                  values.device().str(), " and ", bytes.device().str());
  RTP_CHECK_VALUE(reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) % alignof(float) == 0,
                  "expected quantized numbers at a multiple of ", alignof(float), " bytes");
}

template <typename Action>
void over_blocks(int64_t numbers, Action&& action) {
  at::parallel_for(0, (numbers + kQuantizeBlock - 1) / kQuantizeBlock, kGrain, std::forward<Action>(action));
}

#ifdef RTP_WITH_CUDA
Element kernel_element(const at::Tensor& tensor) {
  const auto element = element_of(tensor.scalar_type());
  RTP_CHECK_TYPE(element.has_value(), "expected float32, bfloat16 or float16 to quantize on a GPU, got ",
                 tensor.scalar_type());
  return *element;
}
#endif

}  // namespace

void quantize(const at::Tensor& bytes, const at::Tensor& values) {
  check(values, bytes);
  if (values.numel() == 0) return;
  const int64_t numbers = values.numel();
  auto* to = static_cast<int8_t*>(bytes.data_ptr());
  auto* scales = reinterpret_cast<float*>(to + quantized_scales(numbers));
#ifdef RTP_WITH_CUDA
  if (values.is_cuda()) {
    const QuantizeParameters parameters{kernel_element(values), numbers, values.const_data_ptr(), to, scales};
    return launch_on_device_of(values, [&](void* stream) { return launch_quantize(parameters, stream); });
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "quantize", [&] {
    const auto* from = values.const_data_ptr<scalar_t>();
    over_blocks(numbers, [&](int64_t first, int64_t last) {
      vectorised([&]() RTP_INLINE_LAMBDA { quantize_blocks(to, scales, from, numbers, first, last); });
    });
  });
}

void dequantize(const at::Tensor& out, const at::Tensor& bytes) {
  check(out, bytes);
  if (out.numel() == 0) return;
  const int64_t numbers = out.numel();
  const auto* from = static_cast<const int8_t*>(bytes.const_data_ptr());
  const auto* scales = reinterpret_cast<const float*>(from + quantized_scales(numbers));
#ifdef RTP_WITH_CUDA
  if (out.is_cuda()) {
    const DequantizeParameters parameters{kernel_element(out), numbers, from, scales, out.data_ptr(), false};
    return launch_on_device_of(out, [&](void* stream) { return launch_dequantize(parameters, stream); });
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "dequantize", [&] {
    auto* to = out.data_ptr<scalar_t>();
    over_blocks(numbers, [&](int64_t first, int64_t last) {
      vectorised([&]() RTP_INLINE_LAMBDA { dequantize_blocks<false>(to, from, scales, numbers, first, last); });
    });
  });
}

void dequantize_add(const at::Tensor& sum, const at::Tensor& bytes) {
  check(sum, bytes);
  if (sum.numel() == 0) return;
  const int64_t numbers = sum.numel();
  const auto* from = static_cast<const int8_t*>(bytes.const_data_ptr());
  const auto* scales = reinterpret_cast<const float*>(from + quantized_scales(numbers));
#ifdef RTP_WITH_CUDA
  if (sum.is_cuda()) {
    const DequantizeParameters parameters{kernel_element(sum), numbers, from, scales, sum.data_ptr(), true};
    return launch_on_device_of(sum, [&](void* stream) { return launch_dequantize(parameters, stream); });
  }
#endif
  AT_DISPATCH_FLOATING_TYPES(sum.scalar_type(), "dequantize_add", [&] {
    auto* to = sum.data_ptr<scalar_t>();
    over_blocks(numbers, [&](int64_t first, int64_t last) {
      vectorised([&]() RTP_INLINE_LAMBDA { add_blocks(to, from, scales, numbers, first, last); });
    });
  });
}

void add_converted(const at::Tensor& sum, const std::vector<at::Tensor>& values) {
  const at::ScalarType type = values[0].scalar_type();
  bool at_once = sum.scalar_type() == at::kFloat && element_of(type) && sum.is_contiguous() &&
                 (values.size() > 1 || type != at::kFloat);
  for (const at::Tensor& each : values) {
    RTP_CHECK_VALUE(sum.sizes() == each.sizes(), "expected values of shape ", sum.sizes(), " to add, got ",
                    each.sizes());
    at_once = at_once && each.is_contiguous() && each.scalar_type() == type;
  }
  if (!at_once) {
    for (const at::Tensor& each : values) sum.add_(each);
    return;
  }
  const int64_t numbers = sum.numel();
  for (size_t first = 0; first < values.size(); first += kMostAddends) {
    Addends from{};
    from.count = static_cast<int>(std::min(values.size() - first, kMostAddends));
    for (int i = 0; i < from.count; ++i) from.values[i] = values[first + static_cast<size_t>(i)].const_data_ptr();
#ifdef RTP_WITH_CUDA
    if (sum.is_cuda()) {
      const AddConvertedParameters parameters{*element_of(type), numbers, from, sum.data_ptr<float>()};
      launch_on_device_of(sum, [&](void* stream) { return launch_add_converted(parameters, stream); });
      continue;
    }
#endif
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, type, "add_converted", [&] {
      auto* to = sum.data_ptr<float>();
      at::parallel_for(0, numbers, kGrain * kQuantizeBlock, [&](int64_t begin, int64_t end) {
        vectorised([&]() RTP_INLINE_LAMBDA { add_converted_range<scalar_t>(to, from, begin, end); });
      });
    });
  }
}

}  // namespace rtp
