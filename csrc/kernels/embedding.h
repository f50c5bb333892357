// The rows of one shard of an embedding table: gathering them, and adding to them. Plain pointers; the same index rule
// on host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/elements.h"

#if defined(__CUDACC__)
#define RTP_HOST_DEVICE __host__ __device__
#else
#define RTP_HOST_DEVICE
#endif

namespace rtp {

// One shard of a table [rows, row_bytes] and the part of the output that it fills. A token t whose id lies in
// [first_row, first_row + rows) gets the row; all other tokens are left as they are.
struct EmbeddingGather {
  const int64_t* ids;  // [tokens]
  int64_t tokens;
  const std::byte* table;
  int64_t first_row;
  int64_t rows;
  int64_t row_bytes;
  std::byte* out;  // row t starts at out + t * out_stride_bytes
  int64_t out_stride_bytes;

  // The row of this shard for token t, or -1.
  RTP_HOST_DEVICE int64_t row(int64_t t) const {
    const int64_t row = ids[t] - first_row;
    return row >= 0 && row < rows ? row : -1;
  }
};

// A gradient of the same rows: table[ids[t] - first_row] += alpha * values[t], for the tokens whose id lies in
// [first_row, first_row + rows) and is not padding_idx. Added in an order of the GPU's choice. Sums in float32 are
// rounded to `table_type` one by one where that has 16 bits.
struct EmbeddingScatter {
  const int64_t* ids;  // [tokens]
  int64_t tokens;
  Element values_type;
  const void* values;  // [tokens, columns]
  int64_t values_stride;
  Element table_type;
  void* table;  // [rows, columns]
  int64_t table_stride;
  int64_t first_row, rows, columns;
  int64_t padding_idx;
  float alpha;
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_embedding_gather(const EmbeddingGather& gather, void* stream);
int launch_embedding_scatter(const EmbeddingScatter& scatter, void* stream);

}  // namespace rtp
