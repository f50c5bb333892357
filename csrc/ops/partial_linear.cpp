#include <ATen/ops/empty.h>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "ops/linear.h"

namespace rtp {
namespace {

constexpr OperationKind kPartialLinear = operation_kind("partial linear");
constexpr int kWeight = 0, kBias = 1;

}  // namespace

at::Tensor partial_linear_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const LinearShape& shape,
                                  const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.in_features);
  const std::vector<at::Tensor> parameters{weight, bias.value_or(at::Tensor())};
  Weights weights(executor, options, kPartialLinear, Pass::forward, parameters);
  weights.add(weight_facts(shape));
  weights.add({{shape.out_features}}, bias.has_value());
  ShardBundle bundle = *weights.bundle();

  ProductSum sum(x.size(0), shape.out_features, x.options());
  const at::Tensor whole_bias = bias ? at::empty({shape.out_features}, x.options()) : at::Tensor();
  const Schedule& schedule = forward_schedule(executor, options, bundle);
  Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
  while (const Step* step = pass.next()) {
    const auto shard = pass.weight();
    const at::Tensor columns = weights.of(x, 1, kWeight, step->owner);
    if (columns.size(1) > 0) sum.add(columns, outputs_first(shard[kWeight], shape).t());
    if (bias) weights.of(whole_bias, 0, kBias, step->owner).copy_(shard[kBias]);
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
  const std::vector<at::Tensor> parameters{weight};
  Weights parts(executor, options, kPartialLinear, Pass::backward, parameters);
  parts.add(weight_facts(shape), true, needs.x);
  parts.add({{shape.out_features}});
  const Gradients gradients(executor, options, parts, {needs.weight, needs.bias});
  std::optional<ShardBundle> weights = parts.bundle();
  at::Tensor dx;
  if (needs.x) dx = executor.results().empty({dy.size(0), shape.in_features}, dy.options());

  const Schedule& schedule =
      backward_schedule(executor, options, weights, {.dgrad = needs.x, .wgrad = gradients.any()});
  Execution pass(executor, schedule, std::move(weights), gradients.bundle(parts), options.name + " backward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    const bool empty = parts.rows(kWeight, owner).count == 0;
    if (step->compute == Compute::dgrad) {
      if (empty) continue;
      gemm(parts.of(dx, 1, kWeight, owner), at::Tensor(), dy, outputs_first(pass.weight()[0], shape));
      continue;
    }
    const Gradients::Sums sums(gradients, pass);
    if (!empty && needs.weight) add_weight_gradient(sums, kWeight, shape, dy, parts.of(x, 1, kWeight, owner));
    if (parts.rows(kBias, owner).count > 0) add_bias_gradient(sums, kBias, parts.of(dy, 1, kBias, owner));
  }
  const std::vector<at::Tensor> result = gradients.result();
  return {dx, result[kWeight], result[kBias]};
}

}  // namespace rtp
