// The products of a whole pass in one kernel, each tile made as soon as the shard that it needs has arrived. Plain
// pointers.
#pragma once

#include <cstdint>

#include "kernels/arriving/arrivals.h"
#include "kernels/common/elements.h"

namespace rtp {

// One product with a shard, all operands of one 16-bit type, summed in float32. Rows of matrices are consecutive
// elements; those of `left` and `weight` start at multiples of 16 bytes, every *_stride elements.
//
// Forward:  out = left @ weight.T + bias, rounded once; out [rows, columns], left [rows, inner], weight [columns,
// inner] Sums:     sum += left @ weight; sum [rows, columns] in float32 without gaps, weight [inner, columns]. Products
// of one
//           sum take turns, so that the sum has the same bits in whatever order shards arrive.
struct ArrivingProduct {
  const void* left;
  const void* weight;
  const void* bias;  // [columns] of the same type; null: none. Forward only
  void* out;         // or the sum
  int32_t left_stride, weight_stride, out_stride;
  int32_t rows, columns, inner;
  int32_t position;
  int32_t turn;     // of a sum's products: how many come before it
  int32_t counter;  // of a sum: where the counters of its tiles begin
  bool adds;        // to what the sum holds, rather than overwrites it
};

constexpr int kMostProducts = 48;
constexpr int kTileRows = 128, kTileColumns = 128;

inline int tiles_of(int rows, int columns) {
  return ((rows + kTileRows - 1) / kTileRows) * ((columns + kTileColumns - 1) / kTileColumns);
}

// Products are in the order of their positions.
struct ArrivingGemm {
  Element type;  // bfloat16 or float16
  bool sums;
  int32_t products;
  Arrivals arrivals;  // blocks are set by the launch
  unsigned* turns;    // of every tile of every sum, 0 at the beginning
  ArrivingProduct product[kMostProducts];
};
static_assert(sizeof(ArrivingGemm) <= 4096, "the parameters of a kernel");

// Blocks that a GPU of that many multiprocessors runs at once, less those of one: what lets the waiting of a kernel end
// where a ring fails may need a place there, as a copy within the GPU does.
constexpr int kBlocksTogether = 2;  // on a multiprocessor
inline int most_blocks(int multiprocessors) {
  return multiprocessors > 1 ? kBlocksTogether * (multiprocessors - 1) : 1;
}

// Enqueues on `stream` (a cudaStream_t). Returns the cudaError_t of the launch.
int launch_arriving_gemm(ArrivingGemm gemm, int blocks, void* stream);
// Has the driver load the kernels now: later it may wait for streams that wait for each other.
int load_arriving_gemm();

}  // namespace rtp
