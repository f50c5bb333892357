#include "kernels/arriving/arriving_gemm.h"
#include "kernels/common/tensor_cores.cuh"
#include "kernels/common/windows.cuh"

namespace rtp {
namespace {

// A block of eight warps makes tiles of 128 x 128, 32 of the inner dimension at a time: each warp 64 x 32 of a tile.
constexpr int kThreads = 256;
constexpr int kInner = 32;
constexpr int kStages = 3;                                   // parts of the operands that are in shared memory
constexpr int kChunk = 8;                                    // elements of 16 bits in 16 bytes
constexpr int kOperandChunks = kTileRows * kInner / kChunk;  // of either operand
constexpr int kStageChunks = 2 * kOperandChunks;             // left, then weight
constexpr int kEach = kOperandChunks / kThreads;             // that a thread copies of either
constexpr int kWarpRows = 64, kWarpColumns = 32;
constexpr int kDown = kWarpRows / 16, kAcross = kWarpColumns / 8;  // products of a warp

// Where chunk `chunk` of row `row` lies, of an operand that is stored along its inner dimension: four chunks a row, so
// placed that eight rows at a time are read from different banks.
__device__ int chunk_along(int row, int chunk) { return row * 4 + (chunk ^ (row >> 1 & 3)); }
// The same of one that is stored across it: sixteen chunks a row.
__device__ int chunk_across(int row, int chunk) { return row * 16 + (chunk ^ (row & 7)); }

// Bytes of a chunk that begins at element `first` of `count`.
__device__ int bytes_of(int first, int count) {
  const int elements = count - first;
  return 2 * (elements < 0 ? 0 : elements > kChunk ? kChunk : elements);
}

// Copies columns [first, first + 32) of rows [row, row + 128) of a matrix [rows, inner].
template <typename T, typename Shared>
__device__ void copy_along(Shared& stages, int base, const T* matrix, int64_t stride, int row, int rows, int first,
                           int inner) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int number = static_cast<int>(threadIdx.x) + i * kThreads;
    const int down = number / 4, chunk = number % 4, column = first + chunk * kChunk;
    const int bytes = row + down < rows ? bytes_of(column, inner) : 0;
    const T* from = bytes > 0 ? matrix + (row + down) * stride + column : matrix;
    copy_async(stages, base + chunk_along(down, chunk), from, bytes);
  }
}

// Copies rows [first, first + 32) of columns [column, column + 128) of a matrix [inner, columns].
template <typename T, typename Shared>
__device__ void copy_across(Shared& stages, int base, const T* matrix, int64_t stride, int column, int columns,
                            int first, int inner) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int number = static_cast<int>(threadIdx.x) + i * kThreads;
    const int down = number / 16, chunk = number % 16, right = column + chunk * kChunk;
    const int bytes = first + down < inner ? bytes_of(right, columns) : 0;
    const T* from = bytes > 0 ? matrix + (first + down) * stride + right : matrix;
    copy_async(stages, base + chunk_across(down, chunk), from, bytes);
  }
}

// One step of a warp: 32 of the inner dimension from a stage.
template <typename T, bool kSums, typename Shared>
__device__ void multiply_stage(float (&sums)[kDown][kAcross][4], Shared& stages, int base) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int top = warp / 4 * kWarpRows, left = warp % 4 * kWarpColumns;
#pragma unroll
  for (int half = 0; half < kInner / 16; ++half) {
    uint32_t a[kDown][4], b[kAcross / 2][4];
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
      load_matrices<false>(a[i], stages, base + chunk_along(top + i * 16 + lane % 16, half * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < kAcross / 2; ++j) {
      const int column = left + j * 16;
      if constexpr (kSums) {
        const int row = half * 16 + lane % 16;
        load_matrices<true>(b[j], stages, base + kOperandChunks + chunk_across(row, column / kChunk + lane / 16));
      } else {
        const int row = column + lane % 8 + lane / 16 * 8;
        load_matrices<false>(b[j], stages, base + kOperandChunks + chunk_along(row, half * 2 + lane / 8 % 2));
      }
    }
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        multiply_add<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// Calls body(first of two columns, row, first of two sums) for all that a thread holds of a tile.
template <typename Body>
__device__ void each_pair(float (&sums)[kDown][kAcross][4], int row, int column, Body&& body) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  row += warp / 4 * kWarpRows + lane / 4;
  column += warp % 4 * kWarpColumns + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kAcross; ++j) {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
      body(column + j * 8, row + i * 16, &sums[i][j][0]);
      body(column + j * 8, row + i * 16 + 8, &sums[i][j][2]);
    }
  }
}

__device__ inline void store_pair(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ inline void store_pair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
__device__ inline void store_pair(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}

// Writes two neighbours of a row, of which the second may lie beyond its end.
template <typename T>
__device__ void store_two(T* to, bool both, float x, float y) {
  if (both && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T)) == 0) {
    store_pair(to, x, y);
    return;
  }
  narrow(to[0], x);
  if (both) narrow(to[1], y);
}

// The product, and the tile of it, that a tile of a position is.
struct Place {
  int product, row, column;
};
__device__ Place place_of(const ArrivingGemm& gemm, int position, int index) {
  int number = 0;
  while (gemm.product[number].position != position) ++number;
  while (true) {
    const ArrivingProduct& product = gemm.product[number];
    const int down = (product.rows + kTileRows - 1) / kTileRows;
    const int tiles = down * ((product.columns + kTileColumns - 1) / kTileColumns);
    // down first: blocks side by side then read the same part of the weight
    if (index < tiles) return {number, index % down, index / down};
    index -= tiles;
    ++number;
  }
}

template <typename T, bool kSums>
__global__ void __launch_bounds__(kThreads, kBlocksTogether) arriving_gemm(const __grid_constant__ ArrivingGemm gemm) {
  RTP_SHARED(uint4, stages, kStages * kStageChunks);
  const bool speaks = threadIdx.x == 0;
  DeviceWords words;
  int first = 0;
  while (true) {
    __syncthreads();
    if (speaks) {
      const TakenTile tile = next_tile(gemm.arrivals, words, first);
      stages[0] = uint4{static_cast<uint32_t>(tile.position), static_cast<uint32_t>(tile.index), 0, 0};
    }
    __syncthreads();
    const uint4 told = stages[0];
    __syncthreads();  // before copies land there
    const int position = static_cast<int>(told.x);
    if (position < 0) break;
    const Place place = place_of(gemm, position, static_cast<int>(told.y));
    const ArrivingProduct& product = gemm.product[place.product];
    const int row = place.row * kTileRows, column = place.column * kTileColumns, inner = product.inner;
    const T* const left = static_cast<const T*>(product.left);
    const T* const weight = static_cast<const T*>(product.weight);
    const auto copy_stage = [&](int step) {
      const int base = step % kStages * kStageChunks, start = step * kInner;
      if (start < inner) {
        copy_along(stages, base, left, product.left_stride, row, product.rows, start, inner);
        if constexpr (kSums) {
          copy_across(stages, base + kOperandChunks, weight, product.weight_stride, column, product.columns, start,
                      inner);
        } else {
          copy_along(stages, base + kOperandChunks, weight, product.weight_stride, column, product.columns, start,
                     inner);
        }
      }
      commit_copies();  // also where there are none, so that groups are steps
    };

    float sums[kDown][kAcross][4] = {};
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) copy_stage(step);
    const int steps = (inner + kInner - 1) / kInner;
    for (int step = 0; step < steps; ++step) {
      await_copies<kStages - 2>();
      __syncthreads();  // all have copied this stage, and read the one before
      copy_stage(step + kStages - 1);
      multiply_stage<T, kSums>(sums, stages, step % kStages * kStageChunks);
    }
    await_copies<0>();

    if constexpr (!kSums) {
      if (product.bias != nullptr) {
        const T* const bias = static_cast<const T*>(product.bias);
        each_pair(sums, row, column, [&](int at, int, float* two) {
          if (at < product.columns) two[0] += widen(bias[at]);
          if (at + 1 < product.columns) two[1] += widen(bias[at + 1]);
        });
      }
    }
    __syncthreads();  // all have read what they need of the shard
    if (speaks) tile_read(gemm.arrivals, words, position);
    if constexpr (kSums) {
      const int down = (product.rows + kTileRows - 1) / kTileRows;
      unsigned* const turns = gemm.turns + product.counter + place.column * down + place.row;
      if (speaks) await_turn(words, turns, static_cast<unsigned>(product.turn));
      __syncthreads();
      each_pair(sums, row, column, [&](int at, int down_at, const float* two) {
        if (down_at >= product.rows || at >= product.columns) return;
        float* const to = static_cast<float*>(product.out) + int64_t{down_at} * product.out_stride + at;
        const bool both = at + 1 < product.columns;
        const float x = product.adds ? to[0] : 0.0f, y = product.adds && both ? to[1] : 0.0f;
        store_two(to, both, two[0] + x, two[1] + y);
      });
      __syncthreads();
      if (speaks) words.set(turns, static_cast<unsigned>(product.turn) + 1);
    } else {
      each_pair(sums, row, column, [&](int at, int down_at, const float* two) {
        if (down_at >= product.rows || at >= product.columns) return;
        T* const to = static_cast<T*>(product.out) + int64_t{down_at} * product.out_stride + at;
        store_two(to, at + 1 < product.columns, two[0], two[1]);
      });
    }
  }
  if (speaks) leave(gemm.arrivals, words);
}

using ArrivingKernel = void (*)(ArrivingGemm);

ArrivingKernel kernel_of(Element type, bool sums) {
  if (type == Element::bfloat16) return sums ? arriving_gemm<__nv_bfloat16, true> : arriving_gemm<__nv_bfloat16, false>;
  return sums ? arriving_gemm<__half, true> : arriving_gemm<__half, false>;
}

}  // namespace

int launch_arriving_gemm(ArrivingGemm gemm, int blocks, void* stream) {
  int64_t tiles = 0;
  for (int position = 0; position < gemm.arrivals.positions; ++position) tiles += gemm.arrivals.tiles[position];
  gemm.arrivals.blocks = static_cast<unsigned>(std::clamp<int64_t>(tiles, 1, std::max(blocks, 1)));
  const LaunchShape shape{dim3(gemm.arrivals.blocks), dim3(kThreads)};
  return launch(kernel_of(gemm.type, gemm.sums), shape, stream, gemm);
}

int load_arriving_gemm() {
#if !defined(RTP_KERNEL_EMULATION)
  for (const Element type : {Element::bfloat16, Element::float16}) {
    for (const bool sums : {false, true}) {
      cudaFuncAttributes attributes;
      const auto status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_of(type, sums)));
      if (status != cudaSuccess) return static_cast<int>(status);
    }
  }
#endif
  return 0;
}

}  // namespace rtp
