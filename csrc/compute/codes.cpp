#include "compute/codes.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/checks.h"
#include "compute/kernel_tensors.h"
#include "compute/rounding.h"
#include "compute/vectorised.h"
#include "kernels/codes.h"

namespace rtp {
namespace {

constexpr int64_t kTile = 256;            // columns of a tile
constexpr int64_t kStrip = 64;            // rows of a tile
constexpr int64_t kGrainNumbers = 32768;  // minimum number of values per thread

int64_t blocks_of(int64_t numbers, int64_t block) { return (numbers + block - 1) / block; }
int64_t grain_of(int64_t numbers) { return std::max<int64_t>(kGrainNumbers / std::max<int64_t>(numbers, 1), 1); }

// Raises amax[column / block_columns] to the largest magnitude of the rows [first, last) in the columns [begin, end).
// `begin` is the first column of a block. Magnitudes compare like their bits; NaNs compare greater than all others.
template <typename Value>
RTP_INLINE void raise_amax(float* amax, const Value* values, int64_t stride, int64_t block_columns, int64_t first,
                           int64_t last, int64_t begin, int64_t end) {
  uint32_t most[kTile];
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t width = std::min(end - tile, kTile);
    for (int64_t i = 0; i < width; ++i) most[i] = 0;
    for (int64_t row = first; row < last; ++row) {
      const Value* const from = values + row * stride + tile;
      for (int64_t i = 0; i < width; ++i) {
        const uint32_t magnitude = bits_of(to_float(from[i])) & kMagnitudeBits;
        most[i] = magnitude > most[i] ? magnitude : most[i];
      }
    }
    for (int64_t i = 0; i < width;) {
      const int64_t block = (tile + i) / block_columns;
      const int64_t stop = std::min((block + 1) * block_columns - tile, width);
      uint32_t largest = bits_of(amax[block]);
      for (; i < stop; ++i) largest = most[i] > largest ? most[i] : largest;
      amax[block] = float_of(largest);
    }
  }
}

template <typename Value>
void raise_all(float* amax, const Value* values, int64_t stride, int64_t rows, int64_t columns, CodeBlock block) {
  const int64_t bands = blocks_of(rows, block.rows), across = blocks_of(columns, block.columns);
  const auto raise = [&](float* to, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t block_columns = block.columns;
    vectorised([=]() RTP_INLINE_LAMBDA { raise_amax(to, values, stride, block_columns, first, last, begin, end); });
  };
  if (bands > 1) {
    at::parallel_for(0, bands, grain_of(block.rows * columns), [&](int64_t begin, int64_t end) {
      for (int64_t band = begin; band < end; ++band) {
        raise(amax + band * across, band * block.rows, std::min((band + 1) * block.rows, rows), 0, columns);
      }
    });
  } else if (across > 1) {
    const int64_t grain = std::max(grain_of(rows * block.columns), blocks_of(kTile, block.columns));
    at::parallel_for(0, across, grain, [&](int64_t begin, int64_t end) {
      raise(amax, 0, rows, begin * block.columns, std::min(end * block.columns, columns));
    });
  } else {  // one block: the largest of strips
    std::vector<float> strips(static_cast<size_t>(blocks_of(rows, kStrip)));
    at::parallel_for(0, static_cast<int64_t>(strips.size()), grain_of(kStrip * columns),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t strip = begin; strip < end; ++strip) {
                         raise(&strips[static_cast<size_t>(strip)], strip * kStrip,
                               std::min((strip + 1) * kStrip, rows), 0, columns);
                       }
                     });
    for (const float most : strips) {
      if (bits_of(most) > bits_of(*amax)) *amax = most;
    }
  }
}

// The codes and scales of the rows [first, last), which begin at a multiple of kStrip.
template <CodeFormat kFormat, typename Value>
RTP_INLINE void quantize_strip(const CodesParameters& p, int64_t first, int64_t last) {
  const CodeMatrix& m = p.matrix;
  const int64_t across = (m.columns + m.block_columns - 1) / m.block_columns;
  const bool transposed = p.column_stride != 1;
  const ScaleRule rule = p.rule;
  float factors[kTile];
  uint8_t codes[kStrip * kTile];
  for (int64_t tile = 0; tile < m.columns; tile += kTile) {
    const int64_t width = std::min(m.columns - tile, kTile);
    for (int64_t row = first; row < last; ++row) {
      const int64_t band = row / m.block_rows;
      const bool top = row % m.block_rows == 0;
      if (top || row == first) {
        for (int64_t i = 0; i < width;) {
          const int64_t block = (tile + i) / m.block_columns;
          const int64_t stop = std::min((block + 1) * m.block_columns - tile, width);
          const BlockScale scale = scale_of<kFormat>(rule, m.amax[band * across + block]);
          if (top && tile + i == block * m.block_columns) {
            const int64_t place = scale_place(p.places, band, block);
            if (has_exponents(rule)) {
              static_cast<uint8_t*>(p.scales)[place] = scale.exponent;
            } else {
              static_cast<float*>(p.scales)[place] = scale.scale;
            }
          }
          for (; i < stop; ++i) factors[i] = scale.factor;
        }
      }
      const Value* const from = static_cast<const Value*>(m.values) + row * m.stride + tile;
      uint8_t* const to = codes + (row - first) * kTile;
      for (int64_t i = 0; i < width; ++i) to[i] = code_of<kFormat>(to_float(from[i]), factors[i]);
    }
    if (transposed) {
      for (int64_t i = 0; i < width; ++i) {
        uint8_t* const to = p.codes + first * p.row_stride + (tile + i) * p.column_stride;
        for (int64_t row = 0; row < last - first; ++row) to[row] = codes[row * kTile + i];
      }
    } else {
      for (int64_t row = first; row < last; ++row) {
        std::memcpy(p.codes + row * p.row_stride + tile, codes + (row - first) * kTile, static_cast<size_t>(width));
      }
    }
  }
}

template <CodeFormat kFormat, typename Value>
void quantize_all(const CodesParameters& p) {
  at::parallel_for(0, blocks_of(p.matrix.rows, kStrip), grain_of(kStrip * p.matrix.columns),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t strip = begin; strip < end; ++strip) {
                       const int64_t first = strip * kStrip, last = std::min(first + kStrip, p.matrix.rows);
                       vectorised([=]() RTP_INLINE_LAMBDA { quantize_strip<kFormat, Value>(p, first, last); });
                     }
                   });
}

// Without its amax.
CodeMatrix matrix_of(const at::Tensor& values, CodeBlock block) {
  const auto element = element_of(values.scalar_type());
  RTP_CHECK_TYPE(element.has_value(), "expected float32, bfloat16 or float16 values for 8-bit codes, got ",
                 values.scalar_type());
  RTP_CHECK_VALUE(values.dim() == 2 && (values.size(1) <= 1 || values.size(0) == 0 || values.stride(1) == 1),
                  "expected a matrix with contiguous rows for 8-bit codes, got shape ", values.sizes(), " and strides ",
                  values.strides());
  const int64_t columns = values.size(1);
  RTP_CHECK_VALUE(block.rows > 0 && block.columns > 0 &&
                      (block.columns == 1 || block.columns % 32 == 0 || block.columns >= columns),
                  "expected blocks of at least 1 row and of 1 column, a multiple of 32 columns or all ", columns,
                  ", got ", block.rows, " x ", block.columns);
  return {*element,         values.size(0), columns,       values.const_data_ptr(),
          values.stride(0), block.rows,     block.columns, nullptr};
}

std::array<int64_t, 2> amax_shape(const CodeMatrix& m) {
  return {blocks_of(m.rows, m.block_rows), blocks_of(m.columns, m.block_columns)};
}

float* checked_amax(const at::Tensor& amax, const at::Tensor& values, const CodeMatrix& matrix) {
  const std::array<int64_t, 2> expected = amax_shape(matrix);
  RTP_CHECK_VALUE(amax.scalar_type() == at::kFloat && amax.sizes() == at::IntArrayRef(expected) &&
                      amax.is_contiguous() && amax.device() == values.device(),
                  "expected contiguous float32 largest magnitudes of shape ", at::IntArrayRef(expected), " on ",
                  values.device().str(), ", got ", amax.scalar_type(), " ", amax.sizes(), " on ", amax.device().str());
  return amax.data_ptr<float>();
}

template <CodeFormat kFormat>
void quantize_as(const CodesParameters& parameters) {
  switch (parameters.matrix.type) {
    case Element::float32:
      return quantize_all<kFormat, float>(parameters);
    case Element::bfloat16:
      return quantize_all<kFormat, c10::BFloat16>(parameters);
    case Element::float16:
      return quantize_all<kFormat, c10::Half>(parameters);
  }
}

}  // namespace

void block_amax(const at::Tensor& amax, const at::Tensor& values, CodeBlock block) {
  CodeMatrix matrix = matrix_of(values, block);
  matrix.amax = checked_amax(amax, values, matrix);
  amax.zero_();
  if (values.numel() == 0) return;
#ifdef RTP_WITH_CUDA
  if (values.is_cuda()) {
    return launch_on_device_of(values, [&](void* stream) { return launch_block_amax(matrix, stream); });
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "block_amax", [&] {
    raise_all(matrix.amax, values.const_data_ptr<scalar_t>(), matrix.stride, matrix.rows, matrix.columns, block);
  });
}

void quantize_codes(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values,
                    const std::optional<at::Tensor>& amax, CodeBlock block, ScaleRule rule) {
  CodeMatrix matrix = matrix_of(values, block);
  if (amax) matrix.amax = checked_amax(*amax, values, matrix);
  const std::array<int64_t, 2> shape = amax_shape(matrix);
  const bool e4m3 = codes.scalar_type() == at::kFloat8_e4m3fn;
  RTP_CHECK_TYPE(e4m3 || codes.scalar_type() == at::kFloat8_e5m2, "expected float8_e4m3fn or float8_e5m2 codes, got ",
                 codes.scalar_type());
  RTP_CHECK_VALUE(codes.sizes() == values.sizes() && (codes.stride(0) == 1 || codes.stride(1) == 1) &&
                      codes.is_non_overlapping_and_dense() && codes.device() == values.device(),
                  "expected dense codes of shape ", values.sizes(), " on ", values.device().str(), ", got ",
                  codes.sizes(), " with strides ", codes.strides(), " on ", codes.device().str());
  const at::ScalarType type = has_exponents(rule) ? at::kFloat8_e8m0fnu : at::kFloat;
  RTP_CHECK_TYPE(scales.scalar_type() == type, "expected ", type, " scales, got ", scales.scalar_type());
  const bool swizzled = has_exponents(rule) && scales.dim() == 1;
  const bool columns = block.columns == 1 && block.rows > 1;  // blocks that a product sums over rows
  const int64_t high = shape[columns ? 1 : 0], wide = shape[columns ? 0 : 1];
  const int64_t room = swizzled_bytes(high, wide);
  RTP_CHECK_VALUE(
      (swizzled ? scales.is_contiguous() && scales.numel() == room : scales.sizes() == at::IntArrayRef(shape)) &&
          scales.device() == values.device(),
      "expected scales of shape ", at::IntArrayRef(shape), ", or [", room, "] for swizzled exponents, on ",
      values.device().str(), ", got ", scales.sizes(), " on ", scales.device().str());
  if (values.numel() == 0) return;
  const ScalePlaces places =
      swizzled ? ScalePlaces{0, 0, wide, columns} : ScalePlaces{scales.stride(0), scales.stride(1), 0, false};
  CodesParameters parameters{matrix,
                             e4m3 ? CodeFormat::e4m3 : CodeFormat::e5m2,
                             rule,
                             static_cast<uint8_t*>(codes.data_ptr()),
                             codes.stride(0),
                             codes.stride(1),
                             scales.data_ptr(),
                             places};
  if (swizzled && room > high * wide) scales.view(at::kByte).zero_();
  bool finds = false;
#ifdef RTP_WITH_CUDA
  finds = values.is_cuda() && finds_amax(parameters);
#endif
  at::Tensor found;
  if (!amax && !finds) {
    found = at::empty(shape, values.options().dtype(at::kFloat));
    block_amax(found, values, block);
    parameters.matrix.amax = found.data_ptr<float>();
  }
#ifdef RTP_WITH_CUDA
  if (values.is_cuda()) {
    return launch_on_device_of(values, [&](void* stream) { return launch_quantize_codes(parameters, stream); });
  }
#endif
  e4m3 ? quantize_as<CodeFormat::e4m3>(parameters) : quantize_as<CodeFormat::e5m2>(parameters);
}

}  // namespace rtp
