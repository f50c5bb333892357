// Gather and scatter-add for the rows of one shard of an embedding table. Raw pointers only; host and device share the
// index rule.
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

// One shard of a table [rows, row_bytes] and the part of the output that it fills. A token whose id lies in [first_row,
// first_row + rows) gets the row; the output of all other tokens is unchanged.
struct EmbeddingGather {
  const int64_t* ids;  // [tokens]
  int64_t tokens;
  const std::byte* table;
  int64_t first_row;
  int64_t rows;
  int64_t row_bytes;
  std::byte* out;  // row t starts at out + t * out_stride_bytes
  int64_t out_stride_bytes;

  // Returns the row of this shard for token t, or -1.
  RTP_HOST_DEVICE int64_t row(int64_t t) const {
    const int64_t row = ids[t] - first_row;
    return row >= 0 && row < rows ? row : -1;
  }
};

// Gradient of the same rows: table[ids[t] - first_row] += alpha * values[t], for the tokens whose id lies in
// [first_row, first_row + rows) and is not padding_idx. The order of the additions is unspecified. For a 16-bit
// `table_type`, every addition rounds to it.
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
