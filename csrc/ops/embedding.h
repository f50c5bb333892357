// Embedding tables whose shards visit every rank.
#pragma once

#include "ops/rotation.h"

namespace rtp {

// A table [num_embeddings, embedding_dim], cut along the vocabulary (shard_dim 0) or the features (shard_dim 1).
struct EmbeddingShape {
  int64_t num_embeddings = 0;
  int64_t embedding_dim = 0;
  int64_t shard_dim = 0;
  int64_t padding_idx = -1;  // its row gets no gradient; -1: none
};

// ids int64 [T], contiguous, each in [0, num_embeddings); weight is this rank's local shard.
// Returns y [T, embedding_dim] in options.compute_dtype.
at::Tensor embedding_forward(Executor& executor, const at::Tensor& ids, const at::Tensor& weight,
                             const EmbeddingShape& shape, const RotationOptions& options);

// dy [T, embedding_dim]. Returns this rank's shard of the gradient, averaged over the ring, in options.reduce_dtype.
// No weights travel.
at::Tensor embedding_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& ids,
                              const EmbeddingShape& shape, const RotationOptions& options);

// The steps of the two for one shard, a table of the rows [first_row, first_row + table.size(0)). Tokens with other ids
// are left out.
//
// out[t] = table[ids[t] - first_row]. table is contiguous, out has consecutive columns.
void gather_rows(const at::Tensor& ids, const at::Tensor& table, int64_t first_row, const at::Tensor& out);
// out[ids[t] - first_row] += alpha * values[t], but for the ids padding_idx. Always in the same order where
// torch.use_deterministic_algorithms asks for it.
void add_rows(const at::Tensor& out, const at::Tensor& ids, const at::Tensor& values, int64_t first_row,
              int64_t padding_idx, double alpha);

}  // namespace rtp
