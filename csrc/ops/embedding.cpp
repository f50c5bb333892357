#include "ops/embedding.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/kernel_tensors.h"
#include "kernels/embedding.h"

namespace rtp {
namespace {

constexpr OperationKind kEmbedding = operation_kind("embedding");
constexpr int kTable = 0;

Weights table_weights(Executor& executor, const RotationOptions& options, Pass pass, const EmbeddingShape& shape,
                      const std::vector<at::Tensor>& local) {
  Weights table(executor, options, kEmbedding, pass, local);
  table.add({{shape.num_embeddings, shape.embedding_dim}, static_cast<size_t>(shape.shard_dim)});
  return table;
}

// The columns of an output that the shard of `owner` fills.
at::Tensor columns(const Weights& table, const EmbeddingShape& shape, const at::Tensor& tensor, int owner) {
  return shape.shard_dim == 0 ? tensor : table.of(tensor, 1, kTable, owner);
}

bool is_empty(const Weights& table, int owner) {
  return table.rows(kTable, owner).count == 0 || table.first_rows(kTable, owner).count == 0;
}

void gather_on_host(const EmbeddingGather& gather) {
  constexpr int64_t kGrain = 256;  // minimum tokens per task: with fewer, a thread costs more than it saves
  at::parallel_for(0, gather.tokens, kGrain, [&gather](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = gather.row(t);
      if (row < 0) continue;
      std::memcpy(gather.out + t * gather.out_stride_bytes, gather.table + row * gather.row_bytes,
                  static_cast<size_t>(gather.row_bytes));
    }
  });
}

void check_ids(const Executor& executor, const EmbeddingShape& shape, const RotationOptions& options,
               const at::Tensor& ids) {
  RTP_CHECK_TYPE(ids.scalar_type() == at::kLong && ids.dim() == 1 && ids.is_contiguous(), options.name,
                 ": expected contiguous int64 ids [T], got ", ids.scalar_type(), " ", ids.sizes());
  RTP_CHECK_TYPE(ids.device() == executor.device(), options.name, ": expected ids on ", executor.device().str(),
                 ", the device of the ring, got ", ids.device().str());
  if (ids.numel() == 0) return;
  if (ids.is_cpu()) {
    const auto [low, high] = ids.aminmax();
    const int64_t first = low.item<int64_t>();
    const int64_t last = high.item<int64_t>();
    TORCH_CHECK_INDEX(first >= 0 && last < shape.num_embeddings, options.name, ": expected ids in [0, ",
                      shape.num_embeddings, "), got ids from ", first, " to ", last);
  } else {
    at::_assert_async(ids.ge(0).logical_and_(ids.lt(shape.num_embeddings)).all());
  }
}

}  // namespace

void gather_rows(const at::Tensor& ids, const at::Tensor& table, int64_t first_row, const at::Tensor& out) {
  const int64_t element = static_cast<int64_t>(table.element_size());
  const EmbeddingGather gather{ids.const_data_ptr<int64_t>(),
                               ids.numel(),
                               static_cast<const std::byte*>(table.const_data_ptr()),
                               first_row,
                               table.size(0),
                               table.size(1) * element,
                               static_cast<std::byte*>(out.data_ptr()),
                               out.stride(0) * element};
  if (table.is_cpu()) {
    gather_on_host(gather);
  } else {
    launch_on_device_of(table, [&](void* stream) { return launch_embedding_gather(gather, stream); });
  }
}

void add_rows(const at::Tensor& out, const at::Tensor& ids, const at::Tensor& values, int64_t first_row,
              int64_t padding_idx, double alpha) {
  // The kernel adds in no fixed order.
  if (kernels_take(out, values) && !at::globalContext().deterministicAlgorithms()) {
    const EmbeddingScatter scatter{ids.const_data_ptr<int64_t>(),
                                   ids.numel(),
                                   *element_of(values.scalar_type()),
                                   values.const_data_ptr(),
                                   values.stride(0),
                                   *element_of(out.scalar_type()),
                                   out.data_ptr(),
                                   out.stride(0),
                                   first_row,
                                   out.size(0),
                                   out.size(1),
                                   padding_idx,
                                   static_cast<float>(alpha)};
    launch_on_device_of(out, [&](void* stream) { return launch_embedding_scatter(scatter, stream); });
    return;
  }
  // Branch-free and without host synchronization: tokens of other shards add a row of zeros to row 0.
  const at::Tensor row = ids.sub(first_row);
  const at::Tensor here = row.ge(0).logical_and_(row.lt(out.size(0))).logical_and_(ids.ne(padding_idx));
  const at::Tensor zero = at::zeros({}, values.options());
  out.index_add_(0, row.mul(here), at::where(here.unsqueeze(1), values, zero).to(out.scalar_type()), alpha);
}

at::Tensor embedding_forward(Executor& executor, const at::Tensor& ids, const at::Tensor& weight,
                             const EmbeddingShape& shape, const RotationOptions& options) {
  check_ids(executor, shape, options, ids);
  const std::vector<at::Tensor> local{weight};
  const at::Tensor y = at::empty({ids.numel(), shape.embedding_dim}, weight.options().dtype(options.compute_dtype));
  table_weights(executor, options, Pass::forward, shape, local).each_chunk([&](const Weights& table) {
    ShardBundle bundle = *table.bundle();
    const Schedule& schedule = forward_schedule(executor, table.options(), bundle);
    Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
    while (const Step* step = pass.next()) {
      const int owner = step->owner;
      if (is_empty(table, owner)) continue;
      gather_rows(ids, pass.weight()[kTable], table.first_rows(kTable, owner).first, columns(table, shape, y, owner));
    }
  });
  return y;
}

at::Tensor embedding_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& ids,
                              const EmbeddingShape& shape, const RotationOptions& options) {
  RTP_CHECK_VALUE(dy.dim() == 2 && dy.size(0) == ids.numel() && dy.size(1) == shape.embedding_dim, options.name,
                  ": expected an output gradient of shape [", ids.numel(), ", ", shape.embedding_dim, "], got ",
                  dy.sizes());
  const std::vector<at::Tensor> none;
  const Weights whole = table_weights(executor, options, Pass::backward, shape, none);
  const Gradients gradients(executor, options, whole, {true});
  whole.each_chunk([&](const Weights& table) {
    const Schedule& schedule = backward_schedule(executor, table.options(), std::nullopt, {.dgrad = kEmbedding.dgrad});
    Execution pass(executor, schedule, std::nullopt, gradients.bundle(table), options.name + " backward");
    while (const Step* step = pass.next()) {
      const int owner = step->owner;
      const Gradients::Sums sums(gradients, pass);
      const at::Tensor out = sums.out(kTable);
      copy_or_zero(out, sums.arrived(kTable));
      if (is_empty(table, owner)) continue;
      add_rows(out, ids, columns(table, shape, dy, owner), table.first_rows(kTable, owner).first, shape.padding_idx,
               sums.scale());
    }
  });
  return gradients.result()[kTable];
}

}  // namespace rtp
