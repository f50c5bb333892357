#include "ops/bundles/mlp.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/joined.h"

namespace rtp {
namespace {

constexpr OperationKind kMlp = operation_kind("mlp");

// The parameters of an MLP, their places, and its layers.
struct MlpWeights : Weights {
  MlpWeights(Executor& executor, const RotationOptions& options, Pass pass, const MlpShape& shape,
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

  // The hidden features of the shards of a step.
  int64_t features(const Step& step) const { return extent(down_weight, step); }
  // A weight of some shards, as [out, in].
  at::Tensor matrix(const std::vector<at::Tensor>& shards, int weight) const {
    return outputs_first(as_stored(weight, shards[static_cast<size_t>(weight)]), weight == down_weight ? down : up);
  }

  LinearShape up, down;  // the gate has the shape of up
  int gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias;
};

// The columns of hidden values that the forward keeps: those of one of its products are adjacent, the gate's first, so
// that a product writes them without a copy.
class KeptColumns {
 public:
  // `group`: what the forward returned, whose plan may differ from that of the backward.
  KeptColumns(Executor& executor, const MlpWeights& layout, int group)
      : layout_(layout), layers_(layout.gate_weight < 0 ? 1 : 2) {
    int64_t column = 0;
    for (const Step& step : products_of(executor, Pass::forward, group, /*wraps=*/true)) {
      const int64_t features = layout.features(step);
      for (const Weights::Range& range : layout.ranges(layout.down_weight, step)) {
        const int64_t gate = column + range.place;
        parts_.push_back({range.first, range.count, gate, gate + (layers_ - 1) * features});
      }
      column += layers_ * features;
    }
  }

  // Returns the values of a product of the forward.
  at::Tensor of(const at::Tensor& kept, const Step& step) const {
    const Weights::Range first = layout_.ranges(layout_.down_weight, step).front();
    return kept.narrow(1, part_with(first.first).gate, layers_ * layout_.features(step));
  }
  // Calls body(first, count, gate, up) for the parts of a step's values that are adjacent: the first of its features,
  // their number, and the views of `kept`; without a gate, both are the same.
  template <typename Body>
  void each_part(const at::Tensor& kept, const Step& step, Body&& body) const {
    for (const Weights::Range& range : layout_.ranges(layout_.down_weight, step)) {
      for (int64_t done = 0, count = 0; done < range.count; done += count) {
        const Part& part = part_with(range.first + done);
        const int64_t skipped = range.first + done - part.first;
        count = std::min(part.count - skipped, range.count - done);
        body(range.place + done, count, kept.narrow(1, part.gate + skipped, count),
             kept.narrow(1, part.up + skipped, count));
      }
    }
  }

 private:
  struct Part {
    int64_t first, count, gate, up;  // the features, and their first columns
  };
  const Part& part_with(int64_t feature) const {
    return *std::find_if(parts_.begin(), parts_.end(),
                         [&](const Part& part) { return feature >= part.first && feature < part.first + part.count; });
  }

  const MlpWeights& layout_;
  std::vector<Part> parts_;
  int64_t layers_;
};

void check_blocks(const MlpShape& shape, const RotationOptions& options) {
  if (!shape.frozen) return;
  const int64_t block = block_layout(*shape.frozen).numbers;
  RTP_CHECK_VALUE(!shape.transposed && shape.hidden_features % block == 0, options.name,
                  ": expected frozen weights stored [out, in] with a multiple of ", block, " hidden features, got ",
                  shape.hidden_features);
}

// Gate and up, which multiply x: one operand if `joined`. Values before the activation, and their gradients, are [M,
// features] for up, or [M, 2 * features] with those of the gate first.
class FirstLayer {
 public:
  // `passes`: see joins(). `trained`: the pass writes the gradients of both.
  FirstLayer(Executor& executor, const MlpWeights& layout, const MlpShape& shape, const RotationOptions& options,
             Pass pass, int64_t tokens, int64_t passes, bool trained)
      : layout_(layout), gated_(shape.gated) {
    int64_t products = 0;
    for (const Step& step : products_of(executor, pass, layout.group(), /*wraps=*/true)) {
      products += layout.features(step) > 0;
    }
    const auto copied = [&](at::ScalarType dtype) {
      return copied_rows(executor, layout, weights(), shape.in_features, dtype, options);
    };
    joined_ = gated_ && (!shape.transposed || layout.grouped()) &&
              joins(products, passes + trained, tokens, shape.in_features, 0,
                    copied(options.compute_dtype) + (trained ? copied(options.reduce_dtype) : 0));
  }

  void take(const std::vector<at::Tensor>& shard) {
    matrices_.clear(), biases_.clear();
    for (const int place : weights()) matrices_.push_back(layout_.matrix(shard, place));
    for (const int place : biases()) biases_.push_back(place < 0 ? at::Tensor() : shard[place]);
    if (joined_) biases_ = {joined_biases(std::move(biases_), matrices_)}, matrices_ = {joined_rows(matrices_)};
  }

  // Returns the values before the activation, in `values` if it is defined.
  at::Tensor project(const at::Tensor& x, at::Tensor values, int64_t features) const {
    if (!values.defined()) values = at::empty({x.size(0), (gated_ ? 2 : 1) * features}, x.options());
    each([&](size_t i, int64_t first, int64_t count) {
      gemm(values.narrow(1, first, count), biases_[i], x, matrices_[i].t());
    });
    return values;
  }
  void add_dgrad(ProductSum& dx, const at::Tensor& d_values) const {
    each([&](size_t i, int64_t first, int64_t count) { dx.add(d_values.narrow(1, first, count), matrices_[i]); });
  }
  void add_wgrad(const Gradients::Sums& sums, const at::Tensor& d_values, const at::Tensor& x) const {
    const std::vector<int> weights = this->weights(), biases = this->biases();
    std::vector<at::Tensor> outs, ins, lefts;
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor left = part(d_values, i);
      add_bias_gradient(sums, biases[i], left);
      if (!sums.wants(weights[i])) continue;
      outs.push_back(outputs_first(sums.out(weights[i]), layout_.up));
      ins.push_back(outputs_first(sums.arrived(weights[i]), layout_.up));
      lefts.push_back(left);
    }
    if (!outs.empty()) add_products(outs, ins, lefts, x, sums.scale(), joined_);
  }

  at::Tensor gate(const at::Tensor& values) const { return gated_ ? part(values, 0) : at::Tensor(); }
  at::Tensor up(const at::Tensor& values) const { return part(values, gated_ ? 1 : 0); }

 private:
  std::vector<int> weights() const {
    return gated_ ? std::vector{layout_.gate_weight, layout_.up_weight} : std::vector{layout_.up_weight};
  }
  std::vector<int> biases() const {
    return gated_ ? std::vector{layout_.gate_bias, layout_.up_bias} : std::vector{layout_.up_bias};
  }
  at::Tensor part(const at::Tensor& values, size_t i) const {
    const int64_t features = values.size(1) / (gated_ ? 2 : 1);
    return values.narrow(1, static_cast<int64_t>(i) * features, features);
  }
  template <typename Body>
  void each(Body&& body) const {
    int64_t first = 0;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      body(i, first, matrices_[i].size(0));
      first += matrices_[i].size(0);
    }
  }

  const MlpWeights& layout_;
  bool gated_, joined_;
  std::vector<at::Tensor> matrices_, biases_;  // of the shards of a step, [rows, in_features] and [rows]
};

// Returns the hidden values of an MLP without a gate, fused with their projection in one cuBLASLt call; undefined if
// that is not supported. `before`, if defined, receives the input of the activation.
at::Tensor project_activated(const at::Tensor& x, const std::vector<at::Tensor>& shard, const MlpWeights& layout,
                             Activation activation, const at::Tensor& before) {
  at::Tensor value;
#ifdef RTP_WITH_CUDA
  if (activation != Activation::gelu_tanh || !x.is_cuda()) return value;
  const at::Tensor w = layout.matrix(shard, layout.up_weight);
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

std::tuple<at::Tensor, KeptValues, int> mlp_forward(Executor& executor, const at::Tensor& x,
                                                    const std::vector<at::Tensor>& parameters, const MlpShape& shape,
                                                    bool keep, const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.in_features);
  check_blocks(shape, options);
  const MlpWeights layout(executor, options, Pass::forward, shape, parameters);
  ShardBundle bundle = *layout.bundle();
  const int64_t rows = x.size(0);

  KeptValues kept;
  if (keep) {
    kept = {executor.results().empty({rows, (shape.gated ? 2 : 1) * shape.hidden_features}, x.options())};
  }
  const KeptColumns columns(executor, layout, layout.group());
  FirstLayer first(executor, layout, shape, options, Pass::forward, rows, /*passes=*/1, /*trained=*/false);
  ProductSum sum(rows, shape.out_features, x.options());
  const at::Tensor bias = shape.down_bias ? at::empty({shape.out_features}, x.options()) : at::Tensor();

  const Schedule& schedule = forward_schedule(executor, options, bundle, {.groups = layout.grouped()});
  Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
  pass.wrap_groups();
  while (const Step* step = pass.next()) {
    const auto shard = pass.weight();
    if (shape.down_bias) {
      for (const auto& [place, begin, count] : layout.ranges(layout.down_bias, *step)) {
        bias.narrow(0, begin, count).copy_(shard[layout.down_bias].narrow(0, place, count));
      }
    }
    const int64_t features = layout.features(*step);
    if (features == 0) continue;
    const at::Tensor room = keep ? columns.of(kept[0], *step) : at::Tensor();
    at::Tensor value;
    if (!shape.gated) value = project_activated(x, shard, layout, shape.activation, room);
    if (!value.defined()) {
      first.take(shard);
      const at::Tensor values = first.project(x, room, features);
      value = hidden_forward(shape.activation, first.up(values), first.gate(values));
    }
    sum.add(value, layout.matrix(shard, layout.down_weight).t());
  }
  at::Tensor y = sum.result();
  if (bias.defined()) y.add_(bias);
  return {executor.results().of(y, options.compute_dtype), std::move(kept), layout.group()};
}

std::vector<at::Tensor> mlp_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                     const KeptValues& kept, int group, const std::vector<at::Tensor>& parameters,
                                     const MlpShape& shape, bool needs_x, const std::vector<bool>& needs_parameter,
                                     const RotationOptions& options) {
  check_operand(executor, options, "an output gradient", dy, shape.out_features);
  check_blocks(shape, options);
  const MlpWeights layout(executor, options, Pass::backward, shape, parameters);
  const Gradients gradients(executor, options, layout, needs_parameter);
  std::optional<ShardBundle> weights = layout.bundle();
  std::optional<ProductSum> dx;
  if (needs_x) dx.emplace(dy.size(0), shape.in_features, dy.options());

  struct Slice {
    at::Tensor value, d_values;
  };
  std::map<int, Slice> hidden;  // by first owner, from their dgrad to their wgrad
  const int64_t passes = (needs_x ? sum_passes(options.compute_dtype) : 0) + kept.empty();
  const bool trained = gradients.wants(layout.gate_weight) && gradients.wants(layout.up_weight);
  const KeptColumns columns(executor, layout, group);
  FirstLayer first(executor, layout, shape, options, Pass::backward, dy.size(0), passes, trained);
  const BackwardNeeds needs{.wgrad = gradients.any(), .bundle = kMlp.bundle, .permits = {.groups = layout.grouped()}};
  const Schedule& schedule = backward_schedule(executor, layout.options(), weights, needs);
  Execution pass(executor, schedule, std::move(weights), gradients.bundle(layout), options.name + " backward");
  pass.wrap_groups();
  while (const Step* step = pass.next()) {
    const int64_t features = layout.features(*step);
    const bool empty = features == 0;
    if (step->compute == Compute::dgrad) {
      if (empty) continue;
      const auto shard = pass.weight();
      first.take(shard);
      const at::Tensor d_value = at::empty({dy.size(0), features}, dy.options());
      gemm(d_value, at::Tensor(), dy, layout.matrix(shard, layout.down_weight));
      const at::Tensor d_values = at::empty({dy.size(0), (shape.gated ? 2 : 1) * features}, dy.options());
      const auto add_part = [&](int64_t begin, int64_t count, const at::Tensor& gate, const at::Tensor& up) {
        const auto of = [&](const at::Tensor& all) { return all.defined() ? all.narrow(1, begin, count) : all; };
        hidden_backward(shape.activation, of(d_value), up, shape.gated ? gate : at::Tensor(), of(first.up(d_values)),
                        of(first.gate(d_values)));
      };
      if (kept.empty()) {
        const at::Tensor values = first.project(x, {}, features);
        add_part(0, features, first.gate(values), first.up(values));
      } else {
        columns.each_part(kept[0], *step, add_part);
      }
      if (dx) first.add_dgrad(*dx, d_values);
      if (gradients.any()) hidden[step->owner] = {d_value, d_values};
      continue;
    }

    const Gradients::Sums sums(gradients, pass);
    if (sums.wants(layout.down_bias)) {
      const at::Tensor out = sums.out(layout.down_bias), arrived = sums.arrived(layout.down_bias);
      for (const auto& [place, begin, count] : layout.ranges(layout.down_bias, *step)) {
        const auto of = [place, count](const at::Tensor& sum) {
          return sum.defined() ? sum.narrow(0, place, count) : sum;
        };
        column_sum(of(out), of(arrived), dy.narrow(1, begin, count), sums.scale());
      }
    }
    if (empty) continue;
    const Slice& slice = hidden.at(step->owner);
    add_weight_gradient(sums, layout.down_weight, layout.down, dy, slice.value);
    first.add_wgrad(sums, slice.d_values, x);
    hidden.erase(step->owner);
  }

  std::vector<at::Tensor> result{dx ? executor.results().of(dx->result(), options.compute_dtype) : at::Tensor()};
  for (at::Tensor& gradient : gradients.result()) result.push_back(std::move(gradient));
  return result;
}

}  // namespace rtp
