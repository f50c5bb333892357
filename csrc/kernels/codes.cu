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
template <Layout kLayout, typename Index = int>
__host__ __device__ Index tiles_of(const CodeMatrix& m) {
  const auto rows = static_cast<Index>(m.rows), columns = static_cast<Index>(m.columns);
  if (kLayout == Layout::rows) return parts_of<Index>(rows, kWarps / warps_of_row(m));
  return parts_of<Index>(rows, kSide) * parts_of<Index>(columns, kSide);
}

// The values of a thread.
template <typename T>
struct Windows {
  static constexpr int kEach = 4 / static_cast<int>(sizeof(T)), kWords = kWidth / kEach;  // numbers in a word, words
  uint32_t words[kWidth][kWords];

  // Loads windows that begin at (row, column) and every (down, along) from there; those outside become zeros.
  __device__ Windows(const CodeMatrix& m, int row, int column, int down, int along) : words{} {
    const T* from = static_cast<const T*>(m.values) + row * m.stride + column;
    const int64_t step = down * m.stride + along;
#pragma unroll
    for (int i = 0; i < kWidth; ++i, row += down, column += along, from += step) {
      if (row >= static_cast<int>(m.rows) || column >= static_cast<int>(m.columns)) continue;
      load_words<uint4>(words[i], reinterpret_cast<const uint32_t*>(from));
    }
  }
  static __device__ float number_in(uint32_t word, int half) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return float_of(half ? word & 0xffff0000u : word << 16);
    if constexpr (std::is_same_v<T, float>) return float_of(word);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (16 * half))));
  }
  __device__ float at(int i, int j) const { return number_in(words[i][j / kEach], j % kEach); }
};

// Magnitudes compare like their bits; NaNs compare greater than all others.
__device__ inline void raise(unsigned& most, unsigned other) { most = other > most ? other : most; }

// The largest magnitudes of words, each number of a word with those in its place.
template <typename T>
struct Largest {
  uint32_t word = 0;

  __device__ void add(uint32_t other) {
    if constexpr (sizeof(T) == 2) {
      word = __vmaxu2(word, other & 0x7fff7fffu);
    } else {
      raise(word, other & kMagnitudeBits);
    }
  }
  // Adds those of lanes whose numbers differ in the bits from kFirst to below kLast.
  template <int kFirst, int kLast>
  __device__ void add_lanes() {
#pragma unroll
    for (int lanes = kFirst; lanes < kLast; lanes *= 2) add(__shfl_xor_sync(kAllLanes, word, lanes));
  }
  __device__ unsigned in(int place) const { return bits_of(Windows<T>::number_in(word, place)); }
  __device__ unsigned of_all() const {
    unsigned most = in(0);
    if (sizeof(T) == 2) raise(most, in(1));
    return most;
  }
};

// The place of a tile, and of the thread's windows, which lie `down` and `along` from each other.
template <Layout kLayout>
struct Tile {
  static constexpr bool kTurned = kLayout == Layout::turned, kRows = kLayout == Layout::rows;
  int top, left = 0, row, column, down = 1, along = 0, warps = 1;

  __device__ Tile(const CodeMatrix& m, int index) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int wide = parts_of(static_cast<int>(m.columns), kSide);
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
  constexpr int kWords = Windows<T>::kWords, kEach = Windows<T>::kEach;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (kLayout == Layout::turned) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      Largest<T> column;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) column.add(values.words[i][word]);
      column.template add_lanes<4, 16>();
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if ((lane & 12) == 0) most[tile.cell_of(word * kEach + j)] = column.in(j);
      }
    }
    return;
  }
  const bool of_cells = kLayout == Layout::wide && m.block_rows == 1;
  Largest<T> all;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    Largest<T> window;
#pragma unroll
    for (int word = 0; word < kWords; ++word) window.add(values.words[i][word]);
    all.add(window.word);
    if (!of_cells) continue;
    window.template add_lanes<1, 4>();
    if (lane % 4 == 0) most[tile.cell_of(i)] = window.of_all();
  }
  if (of_cells) return;
  all.template add_lanes<1, kWarp>();
  if (lane == 0) most[threadIdx.x / kWarp] = all.of_all();
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

// code_of for every number.
template <CodeFormat kFormat>
__device__ uint2 codes_of(const float (&numbers)[kWidth], float factor) {
  uint32_t words[2] = {};
#if __CUDA_ARCH__ >= 890
  constexpr auto kKind = kFormat == CodeFormat::e4m3 ? __NV_E4M3 : __NV_E5M2;
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kWidth; j += 2) {
    const float2 scaled{numbers[j] * factor, numbers[j + 1] * factor};
    nan = nan || isnan(scaled.x) || isnan(scaled.y);
    words[j / 4] |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, kKind)) << (8 * (j % 4));
  }
  if (!nan) return {words[0], words[1]};
  words[0] = words[1] = 0;  // the conversion loses the signs of NaNs
#endif
#pragma unroll
  for (int j = 0; j < kWidth; ++j) words[j / 4] |= code_of<kFormat>(numbers[j], factor) << (8 * (j % 4));
  return {words[0], words[1]};
}

// Writes the codes of window i; turned, of the column i of all windows.
template <CodeFormat kFormat, Layout kLayout, typename T>
__device__ void store_codes(const CodesParameters& p, const Tile<kLayout>& tile, const Windows<T>& values, int i,
                            const float& factor) {
  constexpr bool kTurned = kLayout == Layout::turned;
  const int row = kTurned ? tile.row : tile.row + i * tile.down;
  const int column = kTurned ? tile.column + i : tile.column + i * tile.along;
  if (row >= static_cast<int>(p.matrix.rows) || column >= static_cast<int>(p.matrix.columns)) return;
  float numbers[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) numbers[j] = kTurned ? values.at(j, i) : values.at(i, j);
  // One of the two strides is 1.
  uint8_t* const to = kTurned ? p.codes + column * p.column_stride + row : p.codes + row * p.row_stride + column;
  *reinterpret_cast<uint2*>(to) = codes_of<kFormat>(numbers, factor);
}

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) amax_tiles(CodeMatrix m) {
  __shared__ unsigned most[kCells];
  const int tiles = tiles_of<kLayout>(m), step = static_cast<int>(gridDim.x);
  for (int index = static_cast<int>(blockIdx.x); index < tiles; index += step) {
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
  const int tiles = tiles_of<kLayout>(m), step = static_cast<int>(gridDim.x);
  for (int index = static_cast<int>(blockIdx.x); index < tiles; index += step) {
    // From the last to the first: what was read last for the largest magnitudes is still in the cache.
    const Tile<kLayout> tile(m, tiles - 1 - index);
    Windows<T> values(m, tile.row, tile.column, tile.down, tile.along);
    if (m.amax == nullptr) find_most(most, values, tile, m);
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
      raise(most, bits_of(to_float(static_cast<const T*>(m.values)[row * m.stride + column])) & kMagnitudeBits);
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
         std::max({m.rows, m.columns, m.block_rows, m.block_columns, tiles_of<Layout::wide, int64_t>(m)}) < 1 << 30;
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

template <typename T>
int launch_amax(const CodeMatrix& m, void* stream) {
  if (!has_windows(m) || !has_squares(m))
    return launch(amax_each<T>, block_launch(divide_up(divide_up(m.rows, kStrip) * m.columns, kThreads), kThreads),
                  stream, m);
  const auto kernel = m.block_columns == 1 ? amax_tiles<T, Layout::turned> : amax_tiles<T, Layout::wide>;
  return launch(kernel, block_launch(tiles_of<Layout::wide>(m), kThreads), stream, m);
}

template <typename T, CodeFormat kFormat>
int launch_codes(const CodesParameters& p, void* stream) {
  const CodeMatrix& m = p.matrix;
  if (!has_code_tiles(p))
    return launch(code_each<T, kFormat>, block_launch(divide_up(m.rows * m.columns, kThreads), kThreads), stream, p);
  if (m.amax == nullptr && has_code_rows(p)) {
    return launch(code_tiles<T, kFormat, Layout::rows>, block_launch(tiles_of<Layout::rows>(m), kThreads), stream, p);
  }
  const auto kernel = is_turned(p) ? code_tiles<T, kFormat, Layout::turned> : code_tiles<T, kFormat, Layout::wide>;
  return launch(kernel, block_launch(tiles_of<Layout::wide>(m), kThreads), stream, p);
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
