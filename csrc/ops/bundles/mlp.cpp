#include "ops/bundles/mlp.h"

#include <ATen/ops/empty.h>

#include <map>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

// The layers of an MLP, their places among its parameters (-1: absent), and their cuts.
struct MlpLayout {
  MlpLayout(const MlpShape& shape, int ranks)
      : up{shape.hidden_features, shape.in_features, true, shape.transposed, shape.frozen},
        down{shape.out_features, shape.hidden_features, false, shape.transposed, shape.frozen},
        sizes(cut_features(down, ranks)),
        starts(shard_starts(sizes)),
        bias_sizes(shard_sizes(shape.out_features, ranks)),
        bias_starts(shard_starts(bias_sizes)) {
    if (shape.gated) {
      gate_weight = count++;
      if (shape.up_bias) gate_bias = count++;
    }
    up_weight = count++;
    if (shape.up_bias) up_bias = count++;
    down_weight = count++;
    if (shape.down_bias) down_bias = count++;
  }

  std::vector<TensorLayout> layouts(at::ScalarType dtype) const {
    std::vector<TensorLayout> layouts;
    if (gate_weight >= 0) layouts.push_back(weight_layout(up, sizes, dtype));
    if (gate_bias >= 0) layouts.push_back(bias_layout(up, sizes, dtype));
    layouts.push_back(weight_layout(up, sizes, dtype));
    if (up_bias >= 0) layouts.push_back(bias_layout(up, sizes, dtype));
    layouts.push_back(weight_layout(down, sizes, dtype));
    if (down_bias >= 0) layouts.push_back(bias_layout(down, bias_sizes, dtype));
    return layouts;
  }

  // The slices of the hidden features and of the outputs that belong to the shard of `owner`.
  at::Tensor slice(const at::Tensor& hidden, int owner) const { return hidden.narrow(1, starts[owner], sizes[owner]); }
  at::Tensor bias_slice(const at::Tensor& y, int owner) const {
    return y.narrow(y.dim() - 1, bias_starts[owner], bias_sizes[owner]);
  }

  LinearShape up, down;  // the gate has the shape of up
  std::vector<int64_t> sizes, starts;
  std::vector<int64_t> bias_sizes, bias_starts;
  int gate_weight = -1, gate_bias = -1, up_weight = -1, up_bias = -1, down_weight = -1, down_bias = -1;
  int count = 0;
};

void check_blocks(const MlpShape& shape, const RotationOptions& options) {
  if (!shape.frozen) return;
  const int64_t block = block_layout(*shape.frozen).numbers;
  RTP_CHECK_VALUE(!shape.transposed && shape.hidden_features % block == 0, options.name,
                  ": expected frozen weights stored [out, in] with a multiple of ", block, " hidden features, got ",
                  shape.hidden_features);
}

ShardBundle weight_bundle(const Executor& executor, const MlpLayout& layout, const std::vector<at::Tensor>& parameters,
                          const RotationOptions& options) {
  ShardBundle bundle = travelling_weights(executor, options, layout.layouts(options.compute_dtype), parameters);
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    const char* const what = bundle.layouts[index].shapes[0].size() == 1 ? "bias" : "weight";
    bundle.local[index] = travelling_local(executor, options, what, bundle.local[index], bundle.layouts[index]);
  }
  return bundle;
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
at::Tensor project_activated(const at::Tensor& x, const std::vector<at::Tensor>& shard, const MlpLayout& layout,
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
  const MlpLayout layout(shape, executor.ranks());
  ShardBundle bundle = weight_bundle(executor, layout, parameters, options);
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
    if (shape.down_bias) layout.bias_slice(bias, owner).copy_(shard[layout.down_bias]);
    if (layout.sizes[owner] == 0) continue;
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
  const MlpLayout layout(shape, executor.ranks());
  std::optional<ShardBundle> weights = weight_bundle(executor, layout, parameters, options);

  const Gradients gradients(executor, options, layout.layouts(options.reduce_dtype), needs_parameter);
  std::optional<ProductSum> dx;
  if (needs_x) dx.emplace(dy.size(0), shape.in_features, dy.options());

  std::map<int, Hidden> hidden;  // by owner, from its dgrad to its wgrad
  const Schedule& schedule = backward_schedule(executor, options, weights, {.wgrad = gradients.any(), .bundle = true});
  Execution pass(executor, schedule, std::move(weights), gradients.bundle(), options.name + " backward");
  while (const Step* step = pass.next()) {
    const int owner = step->owner;
    const bool empty = layout.sizes[owner] == 0;
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
      const at::Tensor d_value = at::empty({dy.size(0), layout.sizes[owner]}, dy.options());
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
    if (layout.bias_sizes[owner] > 0) add_bias_gradient(sums, layout.down_bias, layout.bias_slice(dy, owner));
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
