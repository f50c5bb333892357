#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/embedding.h"

namespace rtp {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxBlocks = 4096;

// One block copies the row of one token at a time, in words of the widest type that every address is a multiple of.
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

}  // namespace

int launch_embedding_gather(const EmbeddingGather& gather, void* stream) {
  if (gather.tokens == 0 || gather.rows == 0 || gather.row_bytes == 0) return cudaSuccess;
  const int blocks = static_cast<int>(std::min<int64_t>(gather.tokens, kMaxBlocks));
  const auto s = static_cast<cudaStream_t>(stream);
  const uint64_t alignment = reinterpret_cast<uint64_t>(gather.table) | reinterpret_cast<uint64_t>(gather.out) |
                             static_cast<uint64_t>(gather.row_bytes) | static_cast<uint64_t>(gather.out_stride_bytes);
  if (alignment % sizeof(uint4) == 0) {
    gather_rows<uint4><<<blocks, kThreads, 0, s>>>(gather);
  } else if (alignment % sizeof(uint32_t) == 0) {
    gather_rows<uint32_t><<<blocks, kThreads, 0, s>>>(gather);
  } else {
    gather_rows<uint16_t><<<blocks, kThreads, 0, s>>>(gather);
  }
  return cudaGetLastError();
}

}  // namespace rtp
