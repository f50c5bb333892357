// Embedding tables whose shards visit every rank.
#pragma once

#include "ops/weights.h"

namespace rtp {

// A table [num_embeddings, embedding_dim], cut along the vocabulary (shard_dim 0) or the features (shard_dim 1).
struct EmbeddingShape {
  int64_t num_embeddings = 0;
  int64_t embedding_dim = 0;
  int64_t shard_dim = 0;
  int64_t padding_idx = -1;  // the row without a gradient; -1: none
};

// ids int64 [T], contiguous, each in [0, num_embeddings); weight is this rank's local shard.
// Returns y [T, embedding_dim] in options.compute_dtype.
at::Tensor embedding_forward(Executor& executor, const at::Tensor& ids, const at::Tensor& weight,
                             const EmbeddingShape& shape, const RotationOptions& options);

// dy [T, embedding_dim]. Returns this rank's shard of the gradient, averaged over the ring, in options.reduce_dtype.
// No weights travel.
at::Tensor embedding_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& ids,
                              const EmbeddingShape& shape, const RotationOptions& options);

// The compute steps for one shard, a table of the rows [first_row, first_row + table.size(0)). Tokens with other ids
// are skipped.
//
// out[t] = table[ids[t] - first_row]. table is contiguous, out has contiguous columns.
void gather_rows(const at::Tensor& ids, const at::Tensor& table, int64_t first_row, const at::Tensor& out);
// out[ids[t] - first_row] += alpha * values[t], except for ids equal to padding_idx. The order of additions is fixed if
// torch.use_deterministic_algorithms is enabled.
void add_rows(const at::Tensor& out, const at::Tensor& ids, const at::Tensor& values, int64_t first_row,
              int64_t padding_idx, double alpha);

}  // namespace rtp
