// CUDA includes and the launch function of all kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifndef RTP_MOST_BLOCKS
#define RTP_MOST_BLOCKS 16384  // per launch: enough to fill any GPU several times; kernels use grid-stride loops
#endif

namespace rtp {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct LaunchShape {
  dim3 blocks, threads;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Launch shape for `rows` x `columns` elements: threads lie along x, and a block is as wide as the columns require.
inline LaunchShape tile_launch(int64_t rows, int64_t columns, int threads) {
  int wide = kWarp;
  while (wide < threads && wide < columns) wide *= 2;
  const int high = threads / wide;
  const int64_t x = std::clamp<int64_t>(divide_up(columns, wide), 1, RTP_MOST_BLOCKS);
  const int64_t y = std::clamp<int64_t>(divide_up(rows, high), 1, std::max<int64_t>(RTP_MOST_BLOCKS / x, 1));
  return {dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)),
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high))};
}

// Launch shape for `count` work items, one per block.
inline LaunchShape block_launch(int64_t count, int threads) {
  return {dim3(static_cast<unsigned>(std::clamp<int64_t>(count, 1, RTP_MOST_BLOCKS))),
          dim3(static_cast<unsigned>(threads))};
}

// Enqueues a kernel on `stream` (a cudaStream_t). Returns the cudaError_t of the launch.
template <typename Parameter>
int launch(void (*kernel)(Parameter), const LaunchShape& shape, void* stream, const Parameter& parameter) {
  void* arguments[] = {const_cast<Parameter*>(&parameter)};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads,
                                           arguments,
                                           /*sharedMem=*/0, static_cast<cudaStream_t>(stream)));
}

}  // namespace rtp
