#include "ops/linear.h"

#include <ATen/ops/empty.h>

#include "checks.h"
#include "ops/gemm.h"

namespace rtp {
namespace {

// Where every owner's shards lie in the whole layer.
struct LinearCut {
  LinearCut(const LinearShape& shape, int ranks)
      : by_rows(shape.shard_dim == 0),
        sizes(shard_sizes(by_rows ? shape.out_features : shape.in_features, ranks)),
        starts(shard_starts(sizes)),
        bias_sizes(shard_sizes(shape.out_features, ranks)),
        bias_starts(shard_starts(bias_sizes)) {}

  // The columns of x (cut by input features) or of y (cut by output features) that meet the shard of `owner`.
  at::Tensor columns(const at::Tensor& tensor, int owner) const {
    return tensor.narrow(1, starts[owner], sizes[owner]);
  }
  at::Tensor bias_columns(const at::Tensor& tensor, int owner) const {
    return tensor.narrow(tensor.dim() - 1, bias_starts[owner], bias_sizes[owner]);
  }

  bool by_rows;
  std::vector<int64_t> sizes, starts;
  std::vector<int64_t> bias_sizes, bias_starts;
};

Part weight_part(const LinearShape& shape, const LinearCut& cut, at::ScalarType dtype) {
  return cut_part(dtype, {shape.out_features, shape.in_features}, shape.shard_dim, cut.sizes);
}

Part bias_part(const LinearShape& shape, const LinearCut& cut, at::ScalarType dtype) {
  return cut_part(dtype, {shape.out_features}, 0, cut.bias_sizes);
}

void check_operand(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& tensor,
                   int64_t features) {
  RTP_CHECK_VALUE(tensor.dim() == 2 && tensor.size(1) == features, options.name, ": expected ", what, " of shape [M, ",
                  features, "], got ", tensor.sizes());
  RTP_CHECK_TYPE(tensor.scalar_type() == options.compute_dtype, options.name, ": expected ", what, " of dtype ",
                 options.compute_dtype, ", got ", tensor.scalar_type());
  RTP_CHECK_TYPE(tensor.device() == executor.device(), options.name, ": expected ", what, " on ",
                 executor.device().str(), ", the device of the ring, got ", tensor.device().str());
}

}  // namespace

at::Tensor linear_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const LinearShape& shape,
                          const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.in_features);
  const LinearCut cut(shape, executor.ranks());
  Cargo cargo{{weight_part(shape, cut, options.compute_dtype)}, {weight}};
  if (bias) {
    cargo.parts.push_back(bias_part(shape, cut, options.compute_dtype));
    cargo.home.push_back(*bias);
  }
  for (size_t part = 0; part < cargo.parts.size(); ++part) {
    check_home(executor, options, part == 0 ? "weight" : "bias", cargo.home[part], cargo.parts[part]);
  }

  const int64_t rows = x.size(0);
  at::Tensor y, whole_bias;
  std::optional<ProductSum> sum;
  if (cut.by_rows) {
    y = at::empty({rows, shape.out_features}, x.options());
  } else {
    sum.emplace(rows, shape.out_features, x.options());
    if (bias) whole_bias = at::empty({shape.out_features}, x.options());
  }

  Execution pass(executor, forward_schedule(executor, options, weight), std::move(cargo), std::nullopt,
                 options.name + " forward");
  while (const Step* step = pass.next()) {
    const auto shard = pass.weight();
    if (cut.by_rows) {
      if (cut.sizes[step->owner] == 0) continue;
      gemm(cut.columns(y, step->owner), bias ? shard[1] : at::Tensor(), x, shard[0].t());
    } else {
      if (cut.sizes[step->owner] > 0) sum->add(cut.columns(x, step->owner), shard[0].t());
      if (bias) cut.bias_columns(whole_bias, step->owner).copy_(shard[1]);
    }
  }
  if (cut.by_rows) return y;
  y = sum->result();
  if (bias) y.add_(whole_bias);
  return y.to(options.compute_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(Executor& executor, const at::Tensor& dy,
                                                               const at::Tensor& x, const at::Tensor& weight,
                                                               const LinearShape& shape, const LinearNeeds& needs,
                                                               const RotationOptions& options) {
  check_operand(executor, options, "an output gradient", dy, shape.out_features);
  if (needs.weight) check_operand(executor, options, "a saved input", x, shape.in_features);
  const LinearCut cut(shape, executor.ranks());
  const int64_t rows = dy.size(0);
  const int rank = executor.rank();
  const double scale = 1.0 / executor.ranks();

  std::optional<Cargo> weights;
  at::Tensor dx;
  std::optional<ProductSum> sum;
  if (needs.x) {
    weights = Cargo{{weight_part(shape, cut, options.compute_dtype)}, {weight}};
    check_home(executor, options, "weight", weight, weights->parts[0]);
    if (cut.by_rows) {
      sum.emplace(rows, shape.in_features, dy.options());
    } else {
      dx = at::empty({rows, shape.in_features}, dy.options());
    }
  }
  std::optional<Cargo> gradients;
  if (needs.weight || needs.bias) {
    gradients.emplace();
    if (needs.weight) gradients->parts.push_back(weight_part(shape, cut, options.reduce_dtype));
    if (needs.bias) gradients->parts.push_back(bias_part(shape, cut, options.reduce_dtype));
    for (const Part& part : gradients->parts) {
      gradients->home.push_back(at::empty(part.shapes[rank], dy.options().dtype(options.reduce_dtype)));
    }
  }
  const std::vector<at::Tensor> home = gradients ? gradients->home : std::vector<at::Tensor>{};

  Execution pass(executor, backward_schedule(executor, options, weight, needs.x, gradients.has_value()),
                 std::move(weights), std::move(gradients), options.name + " backward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    if (step->compute == Compute::dgrad) {
      if (cut.sizes[owner] == 0) continue;
      const at::Tensor shard = pass.weight()[0];
      if (cut.by_rows) {
        sum->add(cut.columns(dy, owner), shard);
      } else {
        gemm(cut.columns(dx, owner), at::Tensor(), dy, shard);
      }
      continue;
    }
    const auto in = pass.gradient_in();
    const auto out = pass.gradient_out();
    const auto arrived = [&in](size_t part) { return in.empty() ? at::Tensor() : in[part]; };
    if (needs.weight && cut.sizes[owner] > 0) {
      const at::Tensor left = cut.by_rows ? cut.columns(dy, owner) : dy;
      const at::Tensor right = cut.by_rows ? x : cut.columns(x, owner);
      gemm(out[0], arrived(0), left.t(), right, scale);
    }
    if (needs.bias && cut.bias_sizes[owner] > 0) {
      column_sum(out.back(), arrived(out.size() - 1), cut.bias_columns(dy, owner), scale);
    }
  }
  if (sum) dx = sum->result().to(options.compute_dtype);
  return {dx, needs.weight ? home.front() : at::Tensor(), needs.bias ? home.back() : at::Tensor()};
}

}  // namespace rtp
