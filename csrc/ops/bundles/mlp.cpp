#include "ops/bundles/mlp.h"

#include <ATen/ops/empty.h>

#include <map>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

constexpr OperationKind kMlp = operation_kind("mlp");

// The parameters of an MLP, their places, and its layers.
struct MlpWeights : Weights {
  MlpWeights(const Executor& executor, const RotationOptions& options, Pass pass, const MlpShape& shape,
             const std::vector<at::Tensor>& parameters)
      : Weights(executor, options, kMlp, pass, parameters),
        up{shape.hidden_features, shape.in_features, true, shape.transposed, shape.frozen, /*in_mlp=*/true},
        down{shape.out_features, shape.hidden_features, false, shape.transposed, shape.frozen} {
    const ParameterFacts hidden{{shape.hidden_features}, 0, std::nullopt, weight_facts(up).group};
    gate_weight = add(weight_facts(up), shape.gated);
    gate_bias = add(hidden, shape.gated && shape.up_bias);
    up_weight = add(weight_facts(up));
    up_bias = add(hidden, shape.up_bias);
    down_weight = add(weight_facts(down));
    down_bias = add({{shape.out_features}}, shape.down_bias);
  }

  // The slice of the hidden features that belongs to the shard of `owner`.
  at::Tensor slice(const at::Tensor& hidden, int owner) const { return of(hidden, 1, down_weight, owner); }

  LinearShape up, down;  // the gate has the shape of up
  int gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias;
};

void check_blocks(const MlpShape& shape, const RotationOptions& options) {
  if (!shape.frozen) return;
  const int64_t block = block_layout(*shape.frozen).numbers;
  RTP_CHECK_VALUE(!shape.transposed && shape.hidden_features % block == 0, options.name,
                  ": expected frozen weights stored [out, in] with a multiple of ", block, " hidden features, got ",
                  shape.hidden_features);
}

// Returns the projection of x with one shard, in `out` if it is defined.
at::Tensor project(const at::Tensor& x, const std::vector<at::Tensor>& shard, int weight, int bias,
                   const LinearShape& shape, at::Tensor out) {
  const at::Tensor w = outputs_first(shard[weight], shape);
  if (!out.defined()) out = at::empty({x.size(0), w.size(0)}, x.options());
  gemm(out, bias >= 0 ? shard[bias] : at::Tensor(), x, w.t());
  return out;
}

// Returns the hidden values of an MLP without a gate, fused with their projection in one cuBLASLt call; undefined if
// that is not supported. `before`, if defined, receives the input of the activation.
at::Tensor project_activated(const at::Tensor& x, const std::vector<at::Tensor>& shard, const MlpWeights& layout,
                             Activation activation, const at::Tensor& before) {
  at::Tensor value;
#ifdef RTP_WITH_CUDA
  if (activation != Activation::gelu_tanh || !x.is_cuda()) return value;
  const at::Tensor w = outputs_first(shard[layout.up_weight], layout.up);
  const at::Tensor bias = layout.up_bias >= 0 ? shard[layout.up_bias] : at::Tensor();
  value = at::empty({x.size(0), w.size(0)}, x.options());
  if (!gemm_epilogue(value, before, bias, x, w.t(), /*gelu_tanh=*/true)) value.reset();
#else
  static_cast<void>(x), static_cast<void>(shard), static_cast<void>(layout);
  static_cast<void>(activation), static_cast<void>(before);
#endif
  return value;
}

}  // namespace

MlpResult mlp_forward(Executor& executor, const at::Tensor& x, const std::vector<at::Tensor>& parameters,
                      const MlpShape& shape, bool keep, const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.in_features);
  check_blocks(shape, options);
  const MlpWeights layout(executor, options, Pass::forward, shape, parameters);
  ShardBundle bundle = *layout.bundle();
  const int64_t rows = x.size(0);

  MlpResult result;
  if (keep) {
    for (int i = 0; i < (shape.gated ? 2 : 1); ++i) {
      result.kept.push_back(executor.results().empty({rows, shape.hidden_features}, x.options()));
    }
  }
  const auto room = [&](size_t which, int owner) {
    return keep ? layout.slice(result.kept[which], owner) : at::Tensor();
  };
  ProductSum sum(rows, shape.out_features, x.options());
  const at::Tensor bias = shape.down_bias ? at::empty({shape.out_features}, x.options()) : at::Tensor();

  const Schedule& schedule = forward_schedule(executor, options, bundle);
  Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    const auto shard = pass.weight();
    if (shape.down_bias) layout.of(bias, 0, layout.down_bias, owner).copy_(shard[layout.down_bias]);
    if (layout.rows(layout.down_weight, owner).count == 0) continue;
    at::Tensor value;
    if (!shape.gated) value = project_activated(x, shard, layout, shape.activation, room(0, owner));
    if (!value.defined()) {
      const at::Tensor up = project(x, shard, layout.up_weight, layout.up_bias, layout.up, room(0, owner));
      at::Tensor gate;
      if (shape.gated) gate = project(x, shard, layout.gate_weight, layout.gate_bias, layout.up, room(1, owner));
      value = hidden_forward(shape.activation, up, gate);
    }
    sum.add(value, outputs_first(shard[layout.down_weight], layout.down).t());
  }
  result.y = sum.result();
  if (bias.defined()) result.y.add_(bias);
  result.y = executor.results().of(result.y, options.compute_dtype);
  return result;
}

std::vector<at::Tensor> mlp_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                     const std::vector<at::Tensor>& kept, const std::vector<at::Tensor>& parameters,
                                     const MlpShape& shape, bool needs_x, const std::vector<bool>& needs_parameter,
                                     const RotationOptions& options) {
  check_operand(executor, options, "an output gradient", dy, shape.out_features);
  check_blocks(shape, options);
  const MlpWeights layout(executor, options, Pass::backward, shape, parameters);
  const Gradients gradients(executor, options, layout, needs_parameter);
  std::optional<ShardBundle> weights = layout.bundle();
  std::optional<ProductSum> dx;
  if (needs_x) dx.emplace(dy.size(0), shape.in_features, dy.options());

  std::map<int, Hidden> hidden;  // by owner, from its dgrad to its wgrad
  const BackwardNeeds needs{.wgrad = gradients.any(), .bundle = kMlp.bundle};
  const Schedule& schedule = backward_schedule(executor, options, weights, needs);
  Execution pass(executor, schedule, std::move(weights), gradients.bundle(layout), options.name + " backward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    const int64_t features = layout.rows(layout.down_weight, owner).count;
    const bool empty = features == 0;
    if (step->compute == Compute::dgrad) {
      if (empty) continue;
      const auto shard = pass.weight();
      at::Tensor up, gate;
      if (!kept.empty()) {
        up = layout.slice(kept[0], owner);
        if (shape.gated) gate = layout.slice(kept[1], owner);
      } else {
        up = project(x, shard, layout.up_weight, layout.up_bias, layout.up, {});
        if (shape.gated) gate = project(x, shard, layout.gate_weight, layout.gate_bias, layout.up, {});
      }
      const at::Tensor down = outputs_first(shard[layout.down_weight], layout.down);
      const at::Tensor d_value = at::empty({dy.size(0), features}, dy.options());
      gemm(d_value, at::Tensor(), dy, down);
      Hidden slice = hidden_backward(shape.activation, d_value, up, gate);
      if (dx) {
        dx->add(slice.d_pre, outputs_first(shard[layout.up_weight], layout.up));
        if (shape.gated) dx->add(slice.d_gate, outputs_first(shard[layout.gate_weight], layout.up));
      }
      if (gradients.any()) hidden[owner] = std::move(slice);
      continue;
    }

    const Gradients::Sums sums(gradients, pass);
    if (sums.wants(layout.down_bias) && layout.rows(layout.down_bias, owner).count > 0) {
      add_bias_gradient(sums, layout.down_bias, layout.of(dy, 1, layout.down_bias, owner));
    }
    if (empty) continue;
    const Hidden& slice = hidden.at(owner);
    add_weight_gradient(sums, layout.down_weight, layout.down, dy, slice.value);
    add_weight_gradient(sums, layout.up_weight, layout.up, slice.d_pre, x);
    add_bias_gradient(sums, layout.up_bias, slice.d_pre);
    if (shape.gated) {
      add_weight_gradient(sums, layout.gate_weight, layout.up, slice.d_gate, x);
      add_bias_gradient(sums, layout.gate_bias, slice.d_gate);
    }
    hidden.erase(owner);
  }

  std::vector<at::Tensor> result{dx ? executor.results().of(dx->result(), options.compute_dtype) : at::Tensor()};
  for (at::Tensor& gradient : gradients.result()) result.push_back(std::move(gradient));
  return result;
}

}  // namespace rtp
