#include "compute/joined.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {

at::Tensor joined_view(const std::vector<at::Tensor>& parts, int64_t dim) {
  const at::Tensor& first = parts.front();
  if (parts.size() == 1) return first;
  int64_t extent = first.size(dim);
  for (size_t i = 1; i < parts.size(); ++i) {
    const at::Tensor& part = parts[i];
    if (!part.is_alias_of(first) || part.scalar_type() != first.scalar_type() || part.strides() != first.strides() ||
        part.storage_offset() != first.storage_offset() + extent * first.stride(dim)) {
      return {};
    }
    extent += part.size(dim);
  }
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[static_cast<size_t>(dim)] = extent;
  return first.as_strided(sizes, first.strides(), first.storage_offset());
}

at::Tensor joined_rows(const std::vector<at::Tensor>& parts) {
  at::Tensor joined = joined_view(parts, 0);
  return joined.defined() ? joined : at::cat(parts);
}

at::Tensor joined_biases(std::vector<at::Tensor> parts, const std::vector<at::Tensor>& weights) {
  const auto some = std::find_if(parts.begin(), parts.end(), [](const at::Tensor& part) { return part.defined(); });
  if (some == parts.end()) return {};
  const at::TensorOptions options = some->options();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) parts[i] = at::zeros({weights[i].size(0)}, options);
  }
  return joined_rows(parts);
}

void add_joined(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                const std::function<void(const at::Tensor& out, const at::Tensor& in)>& product) {
  const bool starts = !ins.front().defined();
  const at::Tensor out = joined_view(outs, 0), in = starts ? at::Tensor() : joined_view(ins, 0);
  if (out.defined() && (starts || in.defined())) return product(out, in);
  int64_t rows = 0;
  for (const at::Tensor& each : outs) rows += each.size(0);
  const auto dtype = accumulation_dtype(outs.front().scalar_type());
  const at::Tensor made = at::empty({rows, outs.front().size(1)}, outs.front().options().dtype(dtype));
  product(made, at::Tensor());
  int64_t row = 0;
  for (size_t i = 0; i < outs.size(); ++i) {
    at::Tensor sum = outs[i];
    const at::Tensor part = made.narrow(0, row, sum.size(0));
    starts ? sum.copy_(part) : at::add_out(sum, ins[i], part);
    row += sum.size(0);
  }
}

void add_products(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                  const std::vector<at::Tensor>& lefts, const at::Tensor& right, double alpha, bool joined) {
  const at::Tensor left = joined ? joined_view(lefts, 1) : at::Tensor();
  if (!left.defined()) {
    for (size_t i = 0; i < outs.size(); ++i) gemm(outs[i], ins[i], lefts[i].t(), right, alpha);
    return;
  }
  add_joined(outs, ins, [&](const at::Tensor& out, const at::Tensor& in) { gemm(out, in, left.t(), right, alpha); });
}

void JoinedColumns::add(size_t result, int64_t count) {
  if (count == 0) return;
  std::vector<Block>& blocks = blocks_[result];
  const int64_t column = blocks.empty() ? 0 : blocks.back().column + blocks.back().count;
  blocks.push_back({column, columns_, count});
  columns_ += count;
}

at::Tensor JoinedColumns::of(size_t result, int64_t column, int64_t count) const {
  const std::vector<Block>& blocks = blocks_[result];
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), column,
                                      [](int64_t wanted, const Block& block) { return wanted < block.column; });
  RTP_ASSERT(after != blocks.begin() && column + count <= after[-1].column + after[-1].count, "columns [", column, ", ",
             column + count, ") of a result do not lie side by side");
  return matrix_.narrow(1, after[-1].place + column - after[-1].column, count);
}

template <typename Copy>
void JoinedColumns::each_run(size_t result, const at::Tensor& tensor, Copy&& copy) const {
  const std::vector<Block>& blocks = blocks_[result];
  for (size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    const Block& first = blocks[begin];
    const int64_t step = begin + 1 < blocks.size() ? blocks[begin + 1].place - first.place : 1;
    for (end = begin + 1; end < blocks.size() && blocks[end].count == first.count; ++end) {
      if (blocks[end].place != blocks[end - 1].place + step) break;
    }
    const std::vector<int64_t> shape{matrix_.size(0), static_cast<int64_t>(end - begin), first.count};
    const int64_t column = tensor.stride(1);
    copy(tensor.as_strided(shape, {tensor.stride(0), first.count * column, column},
                           tensor.storage_offset() + first.column * column),
         matrix_.as_strided(shape, {columns_, step, 1}, first.place));
  }
}

void JoinedColumns::copy_from(size_t result, const at::Tensor& tensor) const {
  each_run(result, tensor, [](const at::Tensor& separate, const at::Tensor& joined) { joined.copy_(separate); });
}

void JoinedColumns::copy_to(size_t result, const at::Tensor& tensor) const {
  each_run(result, tensor, [](const at::Tensor& separate, const at::Tensor& joined) { separate.copy_(joined); });
}

}  // namespace rtp
