// How matrices become codes of 8 bits with a scale a block, and the bytes of both. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "base/codes.h"

namespace rtp {

// Rows and columns: of a matrix, of its scales, or in memory.
using Extents = std::array<int64_t, 2>;

// One way to quantize a matrix.
struct CodePlane {
  int64_t block_rows = 0, block_columns = 0;  // of a block; 0: all
  ScaleRule rule = ScaleRule::linear;
  bool transposed = false;  // the codes lie in memory as the transposed matrix: a product sums over rows
  CodeFormat format = CodeFormat::e4m3;
  // Scales lie as torch._scaled_mm takes them on a GPU: exponents swizzled, those of 128 x 128 in rows of a multiple of
  // four, those of 1 x 128 in the order of columns.
  bool padded = false;
  bool whole = false;  // of shards of one matrix: one scale, for the largest magnitude of all of them

  Extents block(int64_t rows, int64_t columns) const {
    return {block_rows > 0 ? block_rows : std::max<int64_t>(rows, 1),
            block_columns > 0 ? block_columns : std::max<int64_t>(columns, 1)};
  }
  Extents scale_shape(int64_t rows, int64_t columns) const {
    const auto [high, wide] = block(rows, columns);
    return {(rows + high - 1) / high, (columns + wide - 1) / wide};
  }
  bool swizzled() const { return padded && has_exponents(rule); }
  // Whether scales lie in memory in the order of columns.
  bool by_columns() const { return padded && !swizzled() && block_rows == 1 && block_columns == 128; }
  int64_t scale_bytes() const { return has_exponents(rule) ? 1 : 4; }
  // The rows and columns of codes and scales in memory, contiguous. Swizzled exponents: rows of tiles, and their bytes.
  Extents code_memory(int64_t rows, int64_t columns) const {
    return transposed ? Extents{columns, rows} : Extents{rows, columns};
  }
  Extents scale_memory(int64_t rows, int64_t columns) const {
    auto [high, wide] = scale_shape(rows, columns);
    if (swizzled()) {
      if (block_columns == 1) std::swap(high, wide);
      return {(high + 127) / 128, swizzled_bytes(1, wide)};
    }
    if (by_columns()) return {wide, high};
    return {high, padded && block_columns == 128 ? (wide + 3) / 4 * 4 : wide};
  }
  int64_t bytes(int64_t rows, int64_t columns) const {
    const auto [high, wide] = scale_memory(rows, columns);
    return rows * columns + high * wide * scale_bytes();
  }
  bool operator==(const CodePlane&) const = default;
  bool single() const { return block_rows == 0 && block_columns == 0; }
  // Whether a product can take matrices that lie one below the other at once, each with scales of its own. `summed`:
  // one that sums over their rows, along which a scale of a whole matrix or column would vary.
  bool stacks(bool summed) const { return !transposed && (block_rows > 0 || (single() && !summed)) && !swizzled(); }
  // Whether a product that sums over rows can take matrices that lie side by side at once.
  bool joins() const { return transposed && block_columns == 1 && !swizzled(); }
};

// The planes in which a weight travels in both passes.
struct CodePlanes {
  CodePlane forward, backward;
};

}  // namespace rtp
