#include <ATen/ops/empty.h>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "ops/linear.h"

namespace rtp {
namespace {

// Sizes and starts of every owner's shards of a layer that is cut along its input features.
struct PartialCut {
  PartialCut(const LinearShape& shape, int ranks)
      : sizes(cut_features(shape, ranks)),
        starts(shard_starts(sizes)),
        bias_sizes(shard_sizes(shape.out_features, ranks)),
        bias_starts(shard_starts(bias_sizes)) {}

  // The columns of x that belong to the shard of `owner`.
  at::Tensor columns(const at::Tensor& x, int owner) const { return x.narrow(1, starts[owner], sizes[owner]); }
  at::Tensor bias_columns(const at::Tensor& y, int owner) const {
    return y.narrow(y.dim() - 1, bias_starts[owner], bias_sizes[owner]);
  }

  std::vector<int64_t> sizes, starts;
  std::vector<int64_t> bias_sizes, bias_starts;
};

}  // namespace

at::Tensor partial_linear_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const LinearShape& shape,
                                  const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.in_features);
  const PartialCut cut(shape, executor.ranks());
  std::vector<TensorLayout> layouts{weight_layout(shape, cut.sizes, options.compute_dtype)};
  std::vector<at::Tensor> local;
  local.reserve(2);
  local.push_back(weight);
  if (bias) {
    layouts.push_back(bias_layout(shape, cut.bias_sizes, options.compute_dtype));
    local.push_back(*bias);
  }
  ShardBundle bundle = travelling_weights(executor, options, std::move(layouts), std::move(local));
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    const char* const what = index == 0 ? "weight" : "bias";
    bundle.local[index] = travelling_local(executor, options, what, bundle.local[index], bundle.layouts[index]);
  }

  ProductSum sum(x.size(0), shape.out_features, x.options());
  const at::Tensor whole_bias = bias ? at::empty({shape.out_features}, x.options()) : at::Tensor();
  const Schedule& schedule = forward_schedule(executor, options, bundle);
  Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
  while (const Step* step = pass.next()) {
    const auto shard = pass.weight();
    if (cut.sizes[step->owner] > 0) sum.add(cut.columns(x, step->owner), outputs_first(shard[0], shape).t());
    if (bias) cut.bias_columns(whole_bias, step->owner).copy_(shard[1]);
  }
  at::Tensor y = sum.result();
  if (bias) y.add_(whole_bias);
  return executor.results().of(y, options.compute_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> partial_linear_backward(Executor& executor, const at::Tensor& dy,
                                                                       const at::Tensor& x, const at::Tensor& weight,
                                                                       const LinearShape& shape,
                                                                       const LinearNeeds& needs,
                                                                       const RotationOptions& options) {
  check_operand(executor, options, "an output gradient", dy, shape.out_features);
  if (needs.weight) check_operand(executor, options, "a saved input", x, shape.in_features);
  const PartialCut cut(shape, executor.ranks());
  const Gradients gradients(
      executor, options,
      {weight_layout(shape, cut.sizes, options.reduce_dtype), bias_layout(shape, cut.bias_sizes, options.reduce_dtype)},
      {needs.weight, needs.bias});
  constexpr int kWeight = 0, kBias = 1;

  std::optional<ShardBundle> weights;
  at::Tensor dx;
  if (needs.x) {
    weights = travelling_weights(executor, options, {weight_layout(shape, cut.sizes, options.compute_dtype)}, {weight});
    weights->local[0] = travelling_local(executor, options, "weight", weight, weights->layouts[0]);
    dx = executor.results().empty({dy.size(0), shape.in_features}, dy.options());
  }

  const Schedule& schedule =
      backward_schedule(executor, options, weights, {.dgrad = needs.x, .wgrad = gradients.any()});
  Execution pass(executor, schedule, std::move(weights), gradients.bundle(), options.name + " backward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    if (step->compute == Compute::dgrad) {
      if (cut.sizes[owner] == 0) continue;
      gemm(cut.columns(dx, owner), at::Tensor(), dy, outputs_first(pass.weight()[0], shape));
      continue;
    }
    const Gradients::Sums sums(gradients, pass);
    if (cut.sizes[owner] > 0 && needs.weight) add_weight_gradient(sums, kWeight, shape, dy, cut.columns(x, owner));
    if (cut.bias_sizes[owner] > 0) add_bias_gradient(sums, kBias, cut.bias_columns(dy, owner));
  }
  const std::vector<at::Tensor> result = gradients.result();
  return {dx, result[kWeight], result[kBias]};
}

}  // namespace rtp
