#include "kernels/common/windows.cuh"
#include "kernels/pack.h"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr int kWindowsPerThread = 4;
constexpr int64_t kTile = int64_t{kThreads} * kWindowsPerThread;  // windows per block and iteration

__device__ void convert(float& to, float from) { to = from; }
__device__ void convert(__nv_bfloat16& to, __nv_bfloat16 from) { to = from; }
__device__ void convert(__half& to, __half from) { to = from; }
template <typename To, typename From>
__device__ void convert(To& to, From from) {
  round_to(to, to_float(from));
}

template <typename From, typename To>
__device__ void copy_tile(const PackEntry& entry, int64_t tile) {
  constexpr int kWidth = kWindow<From, To>;
  To* const to = static_cast<To*>(entry.to);
  const int64_t shift = shift_of(to);
#pragma unroll
  for (int i = 0; i < kWindowsPerThread; ++i) {
    const int64_t first = (tile * kTile + i * kThreads + threadIdx.x) * kWidth - shift;
    if (first >= entry.elements) return;
    From values[kWidth];
    To converted[kWidth];
    load_window<kWidth>(values, static_cast<const From*>(entry.from), first, entry.elements, From{});
#pragma unroll
    for (int k = 0; k < kWidth; ++k) convert(converted[k], values[k]);
    store_window<kWidth>(to, first, entry.elements, converted);
  }
}

template <typename From>
__device__ void copy_tile_from(const PackEntry& entry, int64_t tile) {
  switch (entry.to_type) {
    case Element::float32:
      return copy_tile<From, float>(entry, tile);
    case Element::bfloat16:
      return copy_tile<From, __nv_bfloat16>(entry, tile);
    case Element::float16:
      return copy_tile<From, __half>(entry, tile);
  }
}

__global__ void pack(const __grid_constant__ PackBatch batch) {
  int entry = 0;
  for (int64_t tile = blockIdx.x; tile < batch.first_tile[batch.count]; tile += gridDim.x) {
    while (tile >= batch.first_tile[entry + 1]) ++entry;
    const int64_t here = tile - batch.first_tile[entry];
    switch (batch.entries[entry].from_type) {
      case Element::float32:
        copy_tile_from<float>(batch.entries[entry], here);
        break;
      case Element::bfloat16:
        copy_tile_from<__nv_bfloat16>(batch.entries[entry], here);
        break;
      case Element::float16:
        copy_tile_from<__half>(batch.entries[entry], here);
        break;
    }
  }
}

int64_t size_of(Element type) { return type == Element::float32 ? 4 : 2; }

}  // namespace

int launch_pack(PackBatch batch, void* stream) {
  batch.first_tile[0] = 0;
  for (int i = 0; i < batch.count; ++i) {
    const PackEntry& entry = batch.entries[i];
    const int64_t width = kWindowBytes / std::min(size_of(entry.from_type), size_of(entry.to_type));
    const int64_t shift = misalignment(entry.to) / size_of(entry.to_type);
    const int64_t tiles = entry.elements == 0 ? 0 : divide_up(divide_up(entry.elements + shift, width), kTile);
    batch.first_tile[i + 1] = batch.first_tile[i] + tiles;
  }
  const int64_t tiles = batch.first_tile[batch.count];
  if (tiles == 0) return 0;
  return launch(pack, block_launch(tiles, kThreads), stream, batch);
}

}  // namespace rtp
