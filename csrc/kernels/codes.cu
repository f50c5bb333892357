#include "kernels/codes.h"
#include "kernels/common/windows.cuh"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kStrip = 64;      // rows that a warp reads of a block at most
constexpr int64_t kStretch = 1024;  // and columns
constexpr int kTile = 32;           // rows and columns of a tile of codes; a multiple of kWarps

// The part of a block that one warp reads.
struct Part {
  int64_t band, first, last;  // a block of rows, and the rows
  int64_t block, begin, end;  // a block of columns, and the columns
};

// Parts are `high` strips of rows x `wide` stretches of columns.
struct Parts {
  int64_t strips, high, stretches, wide;
};

__host__ __device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ inline int64_t parts_of(int64_t numbers, int64_t part) { return (numbers + part - 1) / part; }

// With blocks of one column, a warp reads the blocks of kWarp columns.
__host__ __device__ inline Parts parts_of(const CodeMatrix& m) {
  const int64_t bands = parts_of(m.rows, m.block_rows);
  const int64_t strips = parts_of(least(m.block_rows, m.rows), kStrip);
  if (m.block_columns == 1) return {strips, bands * strips, 1, parts_of(m.columns, kWarp)};
  const int64_t stretches = parts_of(least(m.block_columns, m.columns), kStretch);
  return {strips, bands * strips, stretches, parts_of(m.columns, m.block_columns) * stretches};
}

__device__ Part part_at(const CodeMatrix& m, const Parts& parts, int64_t index) {
  const int64_t high = index / parts.wide, wide = index % parts.wide;
  Part part;
  part.band = high / parts.strips;
  part.first = part.band * m.block_rows + high % parts.strips * kStrip;
  part.last = least(least(part.first + kStrip, (part.band + 1) * m.block_rows), m.rows);
  const int64_t block_columns = m.block_columns == 1 ? kWarp : m.block_columns;
  part.block = wide / parts.stretches;
  part.begin = part.block * block_columns + wide % parts.stretches * kStretch;
  part.end = least(least(part.begin + kStretch, (part.block + 1) * block_columns), m.columns);
  return part;
}

// Magnitudes compare like their bits; NaNs compare greater than all others.
template <typename T>
__global__ void block_amax(CodeMatrix m) {
  const T* const values = static_cast<const T*>(m.values);
  const Parts parts = parts_of(m);
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t across = parts_of(m.columns, m.block_columns);
  unsigned* const amax = reinterpret_cast<unsigned*>(m.amax);
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; index < parts.high * parts.wide;
       index += static_cast<int64_t>(gridDim.x) * kWarps) {
    const Part part = part_at(m, parts, index);
    unsigned most = 0;
    for (int64_t row = part.first; row < part.last; ++row) {
      for (int64_t column = part.begin + lane; column < part.end; column += kWarp) {
        const unsigned magnitude = bits_of(to_float(values[row * m.stride + column])) & kMagnitudeBits;
        most = magnitude > most ? magnitude : most;
      }
    }
    if (m.block_columns == 1) {
      if (part.begin + lane < part.end) atomicMax(amax + part.band * across + part.begin + lane, most);
      continue;
    }
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      const unsigned other = __shfl_xor_sync(kAllLanes, most, lanes);
      most = other > most ? other : most;
    }
    if (lane == 0) atomicMax(amax + part.band * across + part.block, most);
  }
}

// A tile of kTile x kTile codes at a time, from left to right.
template <typename T, CodeFormat kFormat>
__global__ void quantize_codes(CodesParameters p) {
  __shared__ uint8_t tile[kTile][kTile + 1];
  const CodeMatrix& m = p.matrix;
  const T* const values = static_cast<const T*>(m.values);
  const int64_t across = parts_of(m.columns, m.block_columns);
  const int64_t wide = parts_of(m.columns, kTile), tiles = parts_of(m.rows, kTile) * wide;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t top = index / wide * kTile, left = index % wide * kTile;
    const int64_t column = left + lane;
    const int64_t block = column / m.block_columns;
    int64_t band = -1;
    BlockScale scale{};
    for (int i = warp; i < kTile; i += kWarps) {
      const int64_t row = top + i;
      if (row >= m.rows || column >= m.columns) break;
      if (row / m.block_rows != band) {
        band = row / m.block_rows;
        scale = scale_of<kFormat>(p.rule, m.amax[band * across + block]);
      }
      if (row == band * m.block_rows && column == block * m.block_columns) {
        const int64_t place = scale_place(p.places, band, block);
        if (has_exponents(p.rule)) {
          static_cast<uint8_t*>(p.scales)[place] = scale.exponent;
        } else {
          static_cast<float*>(p.scales)[place] = scale.scale;
        }
      }
      const uint8_t code = code_of<kFormat>(to_float(values[row * m.stride + column]), scale.factor);
      if (p.column_stride == 1) {
        p.codes[row * p.row_stride + column] = code;
      } else {
        tile[i][lane] = code;
      }
    }
    if (p.column_stride == 1) continue;
    __syncthreads();
    const int64_t row = top + lane;
    for (int i = warp; i < kTile; i += kWarps) {
      if (row < m.rows && left + i < m.columns)
        p.codes[row * p.row_stride + (left + i) * p.column_stride] = tile[lane][i];
    }
    __syncthreads();  // before the next tile is written
  }
}

template <typename T>
int launch_codes(const CodesParameters& parameters, void* stream) {
  const CodeMatrix& m = parameters.matrix;
  const LaunchShape shape = block_launch(divide_up(m.rows, kTile) * divide_up(m.columns, kTile), kThreads);
  switch (parameters.format) {
    case CodeFormat::e4m3:
      return launch(quantize_codes<T, CodeFormat::e4m3>, shape, stream, parameters);
    case CodeFormat::e5m2:
      return launch(quantize_codes<T, CodeFormat::e5m2>, shape, stream, parameters);
  }
  return 0;
}

}  // namespace

int launch_block_amax(const CodeMatrix& matrix, void* stream) {
  if (matrix.rows == 0 || matrix.columns == 0) return 0;
  const Parts parts = parts_of(matrix);
  const LaunchShape shape = block_launch(divide_up(parts.high * parts.wide, kWarps), kThreads);
  switch (matrix.type) {
    case Element::float32:
      return launch(block_amax<float>, shape, stream, matrix);
    case Element::bfloat16:
      return launch(block_amax<__nv_bfloat16>, shape, stream, matrix);
    case Element::float16:
      return launch(block_amax<__half>, shape, stream, matrix);
  }
  return 0;
}

int launch_quantize_codes(const CodesParameters& parameters, void* stream) {
  if (parameters.matrix.rows == 0 || parameters.matrix.columns == 0) return 0;
  switch (parameters.matrix.type) {
    case Element::float32:
      return launch_codes<float>(parameters, stream);
    case Element::bfloat16:
      return launch_codes<__nv_bfloat16>(parameters, stream);
    case Element::float16:
      return launch_codes<__half>(parameters, stream);
  }
  return 0;
}

}  // namespace rtp
