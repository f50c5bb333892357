#include <cuda_fp8.h>

#include "kernels/codes.h"
#include "kernels/common/windows.cuh"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWidth = 8;                       // values of a window, and windows of a thread
constexpr int kHeld = kWarp * kWidth * kWidth;  // values of a warp
constexpr int kSide = 128;                      // rows and columns of a square tile
constexpr int kParts = kSide / kWarp;
constexpr int kCells = kSide * kParts;
constexpr int64_t kStrip = 64;  // rows that a thread of amax_each reads of a column

// The tile that a block of threads holds, and its cells, each of which lies in one block of the matrix.
// wide: a square, cells of 1 row x kWarp columns. turned: a square, cells of kWarp rows x 1 column, for transposed
// codes and blocks of one column. rows: as many whole rows as fit, which are the cells.
enum class Layout { wide, turned, rows };

template <typename Number>
__host__ __device__ Number parts_of(Number numbers, Number part) {
  return (numbers + part - 1) / part;
}
__host__ __device__ inline int warps_of_row(const CodeMatrix& m) {
  int warps = 1;
  while (warps < kWarps && warps * kHeld < m.columns) warps *= 2;
  return warps;
}
template <Layout kLayout>
__host__ __device__ int64_t tiles_of(const CodeMatrix& m) {
  if (kLayout == Layout::rows) return parts_of<int64_t>(m.rows, kWarps / warps_of_row(m));
  return parts_of<int64_t>(m.rows, kSide) * parts_of<int64_t>(m.columns, kSide);
}

// The values of a thread.
template <typename T>
struct Windows {
  static constexpr int kWords = kWidth * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWidth][kWords];

  // Loads windows that begin at (row, column) and every (down, along) from there; those outside become zeros.
  __device__ Windows(const CodeMatrix& m, int64_t row, int column, int down, int along) : words{} {
#pragma unroll
    for (int i = 0; i < kWidth; ++i, row += down, column += along) {
      if (row >= m.rows || column >= m.columns) continue;
      load_words<uint4>(words[i],
                        reinterpret_cast<const uint32_t*>(static_cast<const T*>(m.values) + row * m.stride + column));
    }
  }
  __device__ float at(int i, int j) const {
    const uint32_t word = words[i][j * kWords / kWidth];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return float_of(j % 2 ? word & 0xffff0000u : word << 16);
    if constexpr (std::is_same_v<T, float>) return float_of(word);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (16 * (j % 2)))));
  }
  // Makes a later `at` convert again: floats would take twice the registers meanwhile.
  __device__ void stay_packed() {
#pragma unroll
    for (int i = 0; i < kWidth * kWords; ++i) asm volatile("" : "+r"(words[i / kWords][i % kWords]));
  }
};

// Magnitudes compare like their bits; NaNs compare greater than all others.
__device__ inline unsigned magnitude_of(float value) { return bits_of(value) & kMagnitudeBits; }
__device__ inline void raise(unsigned& most, unsigned other) { most = other > most ? other : most; }

// Returns the largest of lanes whose numbers differ in the bits from kFirst to below kLast.
template <int kFirst, int kLast>
__device__ unsigned most_of_lanes(unsigned most) {
#pragma unroll
  for (int lanes = kFirst; lanes < kLast; lanes *= 2) raise(most, __shfl_xor_sync(kAllLanes, most, lanes));
  return most;
}

// The place of a tile, and of the thread's windows, which lie `down` and `along` from each other.
template <Layout kLayout>
struct Tile {
  static constexpr bool kTurned = kLayout == Layout::turned, kRows = kLayout == Layout::rows;
  int top, left = 0, row, column, down = 1, along = 0, warps = 1;

  __device__ Tile(const CodeMatrix& m, int64_t tile) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int wide = static_cast<int>(parts_of<int64_t>(m.columns, kSide)), index = static_cast<int>(tile);
    if (kRows) {
      warps = warps_of_row(m), down = 0, along = warps * kWarp * kWidth;
      top = index * (kWarps / warps), row = top + warp / warps, column = thread % (warps * kWarp) * kWidth;
      return;
    }
    // A warp reads 2 x 16 windows; turned 8 x 4, so that they and the transposed codes fill whole sectors of memory.
    top = index / wide * kSide, left = index % wide * kSide;
    row = top + (kTurned ? warp / 4 * 8 + lane / 4 : thread / 16) * kWidth;
    column = left + (kTurned ? warp % 4 * 4 + lane % 4 : thread % 16) * kWidth;
  }
  __device__ int cells() const { return kRows ? kWarps / warps : kCells; }
  __device__ int row_of(int cell) const {
    return top + (kRows ? cell : kTurned ? cell / kSide * kWarp : cell / kParts);
  }
  __device__ int column_of(int cell) const {
    return left + (kRows ? 0 : kTurned ? cell % kSide : cell % kParts * kWarp);
  }
  __device__ int cell_of(int i) const {  // of window i; turned, of the column i of all windows
    if (kRows) return row - top;
    return kTurned ? (row - top) / kWarp * kSide + column - left + i
                   : (row - top + i) * kParts + (column - left) / kWarp;
  }
};

// Writes the largest magnitude of every cell; of every warp where a block of the matrix has the values of all its
// lanes.
template <typename T, Layout kLayout>
__device__ void find_most(unsigned* most, const Windows<T>& values, const Tile<kLayout>& tile, const CodeMatrix& m) {
  constexpr bool kTurned = kLayout == Layout::turned;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned of_all = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) raise(largest, magnitude_of(kTurned ? values.at(j, i) : values.at(i, j)));
    raise(of_all, largest);
    if (kLayout == Layout::rows || (!kTurned && m.block_rows != 1)) continue;
    largest = kTurned ? most_of_lanes<4, 16>(largest) : most_of_lanes<1, 4>(largest);
    if ((lane & (kTurned ? 12 : 3)) == 0) most[tile.cell_of(i)] = largest;
  }
  if (kTurned || (kLayout == Layout::wide && m.block_rows == 1)) return;
  of_all = most_of_lanes<1, kWarp>(of_all);
  if (lane == 0) most[threadIdx.x / kWarp] = of_all;
}

// What find_most has written of the block of a cell: `count` numbers from `first` on.
struct Written {
  int first, count, step;

  template <Layout kLayout>
  __device__ Written(const Tile<kLayout>& tile, const CodeMatrix& m, int cell) : first(cell), count(1), step(1) {
    if (kLayout == Layout::rows) {
      first = cell * tile.warps, count = tile.warps;
    } else if (kLayout == Layout::turned) {
      if (m.block_rows != kWarp) first = cell % kSide, count = kParts, step = kSide;
    } else if (m.block_rows != 1) {
      first = 0, count = kWarps;
    } else if (m.block_columns != kWarp) {
      first = cell / kParts * kParts, count = kParts;
    }
  }
  __device__ unsigned most_of(const unsigned* most) const {
    unsigned largest = 0;
    for (int i = 0; i < count; ++i) raise(largest, most[first + i * step]);
    return largest;
  }
};

// The block of a number. Index: of 32 bits where those of the matrix are.
template <typename Index>
struct BlockOf {
  Index band, block;
  int64_t number;
  bool begins;  // with this number

  __device__ BlockOf(const CodeMatrix& m, Index row, Index column) {
    const auto block_rows = static_cast<Index>(m.block_rows), block_columns = static_cast<Index>(m.block_columns);
    band = row / block_rows, block = column / block_columns;
    number = static_cast<int64_t>(band) * parts_of(static_cast<Index>(m.columns), block_columns) + block;
    begins = row == band * block_rows && column == block * block_columns;
  }
};

// Returns the factor of a block; writes its scale if it begins here.
template <CodeFormat kFormat, typename Index>
__device__ float factor_of(const CodesParameters& p, const BlockOf<Index>& at, float amax) {
  const BlockScale scale = scale_of<kFormat>(p.rule, amax);
  if (!at.begins) return scale.factor;
  const int64_t place = scale_place(p.places, at.band, at.block);
  if (has_exponents(p.rule)) {
    static_cast<uint8_t*>(p.scales)[place] = scale.exponent;
  } else {
    static_cast<float*>(p.scales)[place] = scale.scale;
  }
  return scale.factor;
}

// code_of for two numbers, the first in the lower byte.
template <CodeFormat kFormat>
__device__ uint32_t two_codes(float low, float high, float factor) {
#if __CUDA_ARCH__ >= 890
  constexpr auto kKind = kFormat == CodeFormat::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const float2 scaled{low * factor, high * factor};
  const uint32_t signs = (bits_of(low) >> 24 & 0x80) | (bits_of(high) >> 16 & 0x8000);  // those of NaNs are lost
  const uint32_t nans = (isnan(scaled.x) ? 0x7f : 0) | (isnan(scaled.y) ? 0x7f00 : 0);  // e5m2 has several
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, kKind) | signs | nans;
#else
  return code_of<kFormat>(low, factor) | code_of<kFormat>(high, factor) << 8;
#endif
}

// Writes the codes of window i; turned, of the column i of all windows.
template <CodeFormat kFormat, Layout kLayout, typename T>
__device__ void store_codes(const CodesParameters& p, const Tile<kLayout>& tile, const Windows<T>& values, int i,
                            const float& factor) {
  constexpr bool kTurned = kLayout == Layout::turned;
  const int64_t row = kTurned ? tile.row : tile.row + i * tile.down;
  const int64_t column = kTurned ? tile.column + i : tile.column + i * tile.along;
  if (row >= p.matrix.rows || column >= p.matrix.columns) return;
  uint32_t words[kWidth / 4] = {};
#pragma unroll
  for (int j = 0; j < kWidth; j += 2) {
    const float low = kTurned ? values.at(j, i) : values.at(i, j);
    const float high = kTurned ? values.at(j + 1, i) : values.at(i, j + 1);
    words[j / 4] |= two_codes<kFormat>(low, high, factor) << (8 * (j % 4));
  }
  *reinterpret_cast<uint2*>(p.codes + row * p.row_stride + column * p.column_stride) = {words[0], words[1]};
}

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) amax_tiles(CodeMatrix m) {
  __shared__ unsigned most[kCells];
  for (int64_t index = blockIdx.x; index < tiles_of<kLayout>(m); index += gridDim.x) {
    const Tile<kLayout> tile(m, index);
    find_most(most, Windows<T>(m, tile.row, tile.column, tile.down, tile.along), tile, m);
    __syncthreads();
    for (int cell = static_cast<int>(threadIdx.x); cell < tile.cells(); cell += kThreads) {
      const int row = tile.row_of(cell), column = tile.column_of(cell);
      const Written written(tile, m, cell);
      if (written.first != cell || row >= m.rows || column >= m.columns) continue;
      const BlockOf<uint32_t> at(m, row, column);
      atomicMax(reinterpret_cast<unsigned*>(m.amax) + at.number, written.most_of(most));
    }
    __syncthreads();  // before the next tile's are written
  }
}

// The largest magnitudes are given, or no block of the matrix reaches over several tiles.
template <typename T, CodeFormat kFormat, Layout kLayout>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) code_tiles(CodesParameters p) {
  __shared__ unsigned most[kCells];
  __shared__ float factors[kCells];
  const CodeMatrix& m = p.matrix;
  const int64_t tiles = tiles_of<kLayout>(m);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    // From the last to the first: what was read last for the largest magnitudes is still in the cache.
    const Tile<kLayout> tile(m, tiles - 1 - index);
    Windows<T> values(m, tile.row, tile.column, tile.down, tile.along);
    if (m.amax == nullptr) find_most(most, values, tile, m);
    values.stay_packed();
    __syncthreads();
    for (int cell = static_cast<int>(threadIdx.x); cell < tile.cells(); cell += kThreads) {
      const int row = tile.row_of(cell), column = tile.column_of(cell);
      if (row >= m.rows || column >= m.columns) continue;
      const BlockOf<uint32_t> at(m, row, column);
      const float amax = m.amax ? m.amax[at.number] : float_of(Written(tile, m, cell).most_of(most));
      factors[cell] = factor_of<kFormat>(p, at, amax);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) store_codes<kFormat>(p, tile, values, i, factors[tile.cell_of(i)]);
  }
}

// For any sizes, alignments and blocks.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_each(CodeMatrix m) {
  const int64_t strips = parts_of(m.rows, kStrip), step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < strips * m.columns; i += step) {
    const int64_t first = i / m.columns * kStrip, column = i % m.columns;
    unsigned most = 0;
    for (int64_t row = first; row < first + kStrip && row < m.rows; ++row) {
      raise(most, magnitude_of(to_float(static_cast<const T*>(m.values)[row * m.stride + column])));
      if ((row + 1) % m.block_rows != 0 && row + 1 < first + kStrip && row + 1 < m.rows) continue;
      atomicMax(reinterpret_cast<unsigned*>(m.amax) + BlockOf<int64_t>(m, row, column).number, most);
      most = 0;
    }
  }
}

template <typename T, CodeFormat kFormat>
__global__ void __launch_bounds__(kThreads) code_each(CodesParameters p) {
  const CodeMatrix& m = p.matrix;
  const int64_t numbers = m.rows * m.columns, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < numbers; i += step) {
    const int64_t row = i / m.columns, column = i % m.columns;
    const BlockOf<int64_t> at(m, row, column);
    const float value = to_float(static_cast<const T*>(m.values)[row * m.stride + column]);
    p.codes[row * p.row_stride + column * p.column_stride] =
        code_of<kFormat>(value, factor_of<kFormat>(p, at, m.amax[at.number]));
  }
}

// Whether windows are whole and aligned, and numbers of rows, columns and tiles have 32 bits.
bool has_windows(const CodeMatrix& m) {
  return m.columns % kWidth == 0 && misalignment(m.values) == 0 &&
         m.stride * (m.type == Element::float32 ? 4 : 2) % kWindowBytes == 0 &&
         std::max({m.rows, m.columns, m.block_rows, m.block_columns, tiles_of<Layout::wide>(m)}) < 1 << 30;
}

// Whether find_most has what it needs of a square: it lies in one block, or in several that begin where its cells do.
bool has_squares(const CodeMatrix& m) {
  const bool high = m.block_rows % kSide == 0 || m.block_rows >= m.rows;
  const bool wide = m.block_columns % kSide == 0 || m.block_columns >= m.columns;
  if (m.block_columns == 1) return high || m.block_rows == kWarp;
  return m.block_rows == 1 ? wide || m.block_columns == kWarp : high && wide;
}

bool is_turned(const CodesParameters& p) { return p.column_stride != 1; }

bool has_code_tiles(const CodesParameters& p) {
  const CodeMatrix& m = p.matrix;
  if (!has_windows(m) || misalignment(p.codes) % kWidth != 0) return false;
  if (!is_turned(p)) return m.block_columns != 1;
  return m.rows % kWidth == 0 && (m.block_rows % kWarp == 0 || m.block_rows >= m.rows);
}

bool has_code_rows(const CodesParameters& p) {
  const CodeMatrix& m = p.matrix;
  return !is_turned(p) && m.block_rows == 1 && m.block_columns >= m.columns && m.columns <= kWarps * kHeld;
}

template <typename Parameters>
int launch_threads(void (*kernel)(Parameters), int64_t count, void* stream, const Parameters& parameters) {
  return launch(kernel, block_launch(divide_up(count, kThreads), kThreads), stream, parameters);
}

template <typename T>
int launch_amax(const CodeMatrix& m, void* stream) {
  if (!has_windows(m) || !has_squares(m))
    return launch_threads(amax_each<T>, divide_up(m.rows, kStrip) * m.columns, stream, m);
  const auto kernel = m.block_columns == 1 ? amax_tiles<T, Layout::turned> : amax_tiles<T, Layout::wide>;
  return launch_threads(kernel, tiles_of<Layout::wide>(m) * kThreads, stream, m);
}

template <typename T, CodeFormat kFormat>
int launch_codes(const CodesParameters& p, void* stream) {
  const CodeMatrix& m = p.matrix;
  if (!has_code_tiles(p)) return launch_threads(code_each<T, kFormat>, m.rows * m.columns, stream, p);
  if (m.amax == nullptr && has_code_rows(p)) {
    return launch_threads(code_tiles<T, kFormat, Layout::rows>, tiles_of<Layout::rows>(m) * kThreads, stream, p);
  }
  const auto kernel = is_turned(p) ? code_tiles<T, kFormat, Layout::turned> : code_tiles<T, kFormat, Layout::wide>;
  return launch_threads(kernel, tiles_of<Layout::wide>(m) * kThreads, stream, p);
}

template <typename Body>
int with_type(Element type, Body&& body) {
  if (type == Element::float32) return body(float{});
  return type == Element::bfloat16 ? body(__nv_bfloat16{}) : body(__half{});
}

}  // namespace

int launch_block_amax(const CodeMatrix& matrix, void* stream) {
  if (matrix.rows == 0 || matrix.columns == 0) return 0;
  return with_type(matrix.type, [&](auto zero) { return launch_amax<decltype(zero)>(matrix, stream); });
}

bool finds_amax(const CodesParameters& p) {
  const CodeMatrix& m = p.matrix;
  const bool inside = std::min(m.block_rows, m.rows) <= kSide && std::min(m.block_columns, m.columns) <= kSide;
  const bool in_squares = inside && has_squares(m) && is_turned(p) == (m.block_columns == 1);
  return has_code_tiles(p) && (has_code_rows(p) || in_squares);
}

int launch_quantize_codes(const CodesParameters& parameters, void* stream) {
  if (parameters.matrix.rows == 0 || parameters.matrix.columns == 0) return 0;
  if (parameters.matrix.amax == nullptr && !finds_amax(parameters)) return cudaErrorInvalidValue;
  return with_type(parameters.matrix.type, [&](auto zero) {
    using T = decltype(zero);
    return parameters.format == CodeFormat::e4m3 ? launch_codes<T, CodeFormat::e4m3>(parameters, stream)
                                                 : launch_codes<T, CodeFormat::e5m2>(parameters, stream);
  });
}

}  // namespace rtp
