#include "kernels/common/windows.cuh"
#include "kernels/embedding.h"

namespace rtp {
namespace {

constexpr int kThreads = 128;
constexpr int kGroup = 4;  // adjacent columns per thread

// Each block copies the row of one token at a time, in the widest words that all addresses are aligned to.
template <typename Word>
__global__ void gather_rows(EmbeddingGather gather) {
  const int64_t words = gather.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t t = blockIdx.x; t < gather.tokens; t += gridDim.x) {
    const int64_t row = gather.row(t);
    if (row < 0) continue;
    const Word* from = reinterpret_cast<const Word*>(gather.table + row * gather.row_bytes);
    Word* to = reinterpret_cast<Word*>(gather.out + t * gather.out_stride_bytes);
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
  }
}

// Atomic additions to kGroup adjacent elements; `to` is aligned to their total size.
__device__ void add_group(float* to, const float (&values)[kGroup]) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(to), make_float4(values[0], values[1], values[2], values[3]));
#else
#pragma unroll
  for (int i = 0; i < kGroup; ++i) atomicAdd(to + i, values[i]);
#endif
}

__device__ void add_group(__nv_bfloat16* to, const float (&values)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(to + i), __floats2bfloat162_rn(values[i], values[i + 1]));
  }
}

__device__ void add_group(__half* to, const float (&values)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    atomicAdd(reinterpret_cast<__half2*>(to + i), __floats2half2_rn(values[i], values[i + 1]));
  }
}

// Each block adds the row of one token at a time. Groups of columns start at aligned addresses of the table row.
template <typename T, typename Sum>
__global__ void scatter_rows(EmbeddingScatter scatter) {
  constexpr int64_t kGroupBytes = kGroup * static_cast<int64_t>(sizeof(Sum));
  for (int64_t t = blockIdx.x; t < scatter.tokens; t += gridDim.x) {
    const int64_t id = scatter.ids[t];
    const int64_t row = id - scatter.first_row;
    if (row < 0 || row >= scatter.rows || id == scatter.padding_idx) continue;
    const T* const values = static_cast<const T*>(scatter.values) + t * scatter.values_stride;
    Sum* const sums = static_cast<Sum*>(scatter.table) + row * scatter.table_stride;
    const int64_t shift = misalignment(sums) % kGroupBytes / static_cast<int64_t>(sizeof(Sum));
    for (int64_t first = threadIdx.x * kGroup - shift; first < scatter.columns; first += blockDim.x * kGroup) {
      if (is_whole(first, kGroup, scatter.columns)) {
        float group[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) group[i] = scatter.alpha * to_float(values[first + i]);
        add_group(sums + first, group);
        continue;
      }
      for (int64_t i = first < 0 ? 0 : first; i < first + kGroup && i < scatter.columns; ++i) {
        Sum value;
        round_to(value, scatter.alpha * to_float(values[i]));
        atomicAdd(sums + i, value);
      }
    }
  }
}

template <typename T>
int launch_scatter(const EmbeddingScatter& scatter, void* stream) {
  int threads = kWarp;
  while (threads < kThreads && threads * kGroup < scatter.columns) threads *= 2;
  const LaunchShape shape = block_launch(scatter.tokens, threads);
  switch (scatter.table_type) {
    case Element::float32:
      return launch(scatter_rows<T, float>, shape, stream, scatter);
    case Element::bfloat16:
      return launch(scatter_rows<T, __nv_bfloat16>, shape, stream, scatter);
    default:
      return launch(scatter_rows<T, __half>, shape, stream, scatter);
  }
}

}  // namespace

int launch_embedding_gather(const EmbeddingGather& gather, void* stream) {
  if (gather.tokens == 0 || gather.rows == 0 || gather.row_bytes == 0) return 0;
  const LaunchShape shape = block_launch(gather.tokens, kThreads);
  const uint64_t alignment = reinterpret_cast<uint64_t>(gather.table) | reinterpret_cast<uint64_t>(gather.out) |
                             static_cast<uint64_t>(gather.row_bytes) | static_cast<uint64_t>(gather.out_stride_bytes);
  if (alignment % sizeof(uint4) == 0) return launch(gather_rows<uint4>, shape, stream, gather);
  if (alignment % sizeof(uint32_t) == 0) return launch(gather_rows<uint32_t>, shape, stream, gather);
  return launch(gather_rows<uint16_t>, shape, stream, gather);
}

int launch_embedding_scatter(const EmbeddingScatter& scatter, void* stream) {
  if (scatter.tokens == 0 || scatter.rows == 0 || scatter.columns == 0) return 0;
  switch (scatter.values_type) {
    case Element::float32:
      return launch_scatter<float>(scatter, stream);
    case Element::bfloat16:
      return launch_scatter<__nv_bfloat16>(scatter, stream);
    default:
      return launch_scatter<__half>(scatter, stream);
  }
}

}  // namespace rtp
