#include "ops/linear.h"

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/joined.h"

namespace rtp {
namespace {

// The parameters of a bundle in one pass, and the places of every layer's weight and bias.
struct LinearWeights : Weights {
  // `needed`: by layer, whether its weight travels; empty: all.
  LinearWeights(Executor& executor, const RotationOptions& options, Pass pass, const LinearBundle& bundle,
                const std::vector<at::Tensor>& parameters, const std::vector<bool>& needed = {})
      : Weights(executor, options, kLinear, pass, parameters), bundle(bundle) {
    for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
      const LinearShape& shape = bundle.shapes[layer];
      RTP_CHECK_VALUE(!shape.transposed || !shape.frozen, options.name, ": expected a frozen weight stored [out, in]");
      weight.push_back(add(weight_facts(shape), true, needed.empty() || needed[layer]));
      bias.push_back(add({{shape.out_features}}, bundle.biased[layer]));
    }
  }

  // The weight of a layer in the shards of a pass, as [out, in].
  at::Tensor matrix(const std::vector<at::Tensor>& shards, int64_t layer) const {
    const int place = weight[static_cast<size_t>(layer)];
    return outputs_first(as_stored(place, shards[index(place)]), bundle.shapes[static_cast<size_t>(layer)]);
  }

  const LinearBundle& bundle;
  std::vector<int> weight, bias;  // by layer
};

// The overlap of a projection with the shard of one owner, or of all, of the weight or bias of its layer.
struct Overlap {
  Overlap(const Projection& projection, const Rows& shard) {
    const int64_t begin = std::max(projection.begin, shard.first);
    rows = std::max<int64_t>(std::min(projection.end, shard.first + shard.count) - begin, 0);
    row = begin - shard.first;
    column = begin - projection.begin;
  }

  at::Tensor of_output(const at::Tensor& y) const { return y.narrow(1, column, rows); }
  at::Tensor of_rows(const at::Tensor& shard) const { return shard.defined() ? shard.narrow(0, row, rows) : shard; }

  int64_t rows = 0;    // number of rows
  int64_t row = 0;     // first row in the shard
  int64_t column = 0;  // first column in the output
};

// What a pass does with the operand that several projections multiply: see joins().
struct OperandUse {
  int64_t passes = 1;
  bool weights = true;     // it reads the weights
  bool gradients = false;  // it writes gradients of several weights
  bool halves = false;     // these travel in two halves
};

// The projections of one input. Their outputs, or the gradients of these, lie side by side if the products of a shard
// are joined: by owner, half, and projection.
class InputProjections {
 public:
  // `used`: by projection, whether it has products.
  InputProjections(Executor& executor, const LinearWeights& layers, const LinearBundle& bundle,
                   const std::vector<Projection>& projections, int64_t input, const at::Tensor& x,
                   const std::vector<bool>& used, const OperandUse& use, Pass pass, const RotationOptions& options)
      : input(input) {
    std::vector<int> places;
    for (size_t k = 0; k < projections.size(); ++k) {
      if (projections[k].input != input) continue;
      members.push_back(k);
      const int place = layers.weight[static_cast<size_t>(projections[k].layer)];
      if (used[k] && (places.empty() || places.back() != place)) places.push_back(place);
    }
    const bool apart = bundle.shapes[projections[members[0]].layer].transposed && !layers.grouped();
    if (members.size() < 2 || places.empty() || apart) return;
    // a chunk of a shard, which is of a single layer, has other halves
    if (use.halves && places.size() > 1 && !layers.grouped()) halves = {Half::first, Half::second};
    JoinedColumns columns(projections.size());
    int64_t repeats = 0;
    for (const Step& product : products_of(executor, pass, layers.group())) {
      int64_t products = 0;
      for (const Half half : halves) {
        for (const size_t k : members) {
          if (!used[k]) continue;
          const int place = layers.weight[static_cast<size_t>(projections[k].layer)];
          const Overlap overlap(projections[k], layers.rows(place, product.owner, half, product.owners));
          columns.add(k, overlap.rows);
          products += overlap.rows > 0 && half != Half::second;
        }
      }
      repeats += std::max<int64_t>(products - 1, 0);
    }
    const int64_t features = bundle.shapes[projections[members[0]].layer].in_features;
    int64_t copied = 0;
    if (places.size() > 1) {
      const auto rows = [&](at::ScalarType dtype) {
        return copied_rows(executor, layers, places, features, dtype, options);
      };
      copied = (use.weights ? rows(options.compute_dtype) : 0) + (use.gradients ? rows(options.reduce_dtype) : 0);
    }
    if (!joins(repeats, use.passes, x.size(0), features, columns.columns(), copied)) {
      halves = {Half::whole};
      return;
    }
    columns.allocate(x.size(0), x.options());
    joined.emplace(std::move(columns));
  }

  // The columns of an output, or of its gradient, that belong to an overlap.
  at::Tensor columns(size_t k, const Overlap& overlap, const at::Tensor& output) const {
    return joined ? joined->of(k, overlap.column, overlap.rows) : overlap.of_output(output);
  }

  // The rows of the weights in a product with the largest shard.
  int64_t product_rows(const LinearWeights& layers, const Weights& part) const {
    if (!joined) return part.rows(0, 0).count;
    int64_t rows = 0;
    for (const int weight : layers.weight) rows += part.rows(weight, 0).count;
    return rows;
  }

  int64_t input;
  std::vector<size_t> members;
  std::vector<Half> halves{Half::whole};  // pieces of a shard that lie side by side
  std::optional<JoinedColumns> joined;
};

// The backward of a bundle, with the state that its passes share.
class BundleBackward {
 public:
  BundleBackward(Executor& executor, const std::vector<at::Tensor>& dys, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                 const std::vector<Projection>& projections, const std::vector<bool>& needs_input,
                 const std::vector<bool>& needs_parameter, const RotationOptions& options)
      : executor_(executor),
        dys_(dys),
        inputs_(inputs),
        bundle_(bundle),
        projections_(projections),
        needs_input_(needs_input),
        options_(options),
        weights_(executor, options, Pass::backward, bundle, parameters, needed_layers()),
        gradients_(executor, options, weights_, needs_parameter),
        sums_(inputs.size()) {
    std::vector<bool> used;
    for (size_t k = 0; k < projections.size(); ++k) {
      const Projection& projection = projections[k];
      const int64_t outputs = projection.end - projection.begin;
      if (dys[k].defined()) check_operand(executor, options, "an output gradient", dys[k], outputs);
      used.push_back(dys[k].defined());
      if (!needs_input[projection.input] || sums_[projection.input]) continue;
      const at::Tensor& x = inputs[projection.input];
      const int64_t features = bundle.shapes[projection.layer].in_features;
      sums_[projection.input].emplace(x.size(0), features, x.options().dtype(options.compute_dtype));
    }
    for (size_t input = 0; input < inputs.size(); ++input) {
      int trained = 0;
      for (size_t k = 0; k < projections.size(); ++k) {
        const bool its = projections[k].input == static_cast<int64_t>(input) && used[k];
        trained += its && gradients_.wants(weights_.weight[projections[k].layer]);
      }
      const int64_t passes = needs_input[input] ? sum_passes(options.compute_dtype) : 0;
      const OperandUse use{passes + (trained > 1), needs_input[input], trained > 1, halves()};
      groups_.emplace_back(executor, weights_, bundle, projections, input, inputs[input], used, use, Pass::backward,
                           options);
      const InputProjections& group = groups_.back();
      if (!group.joined) continue;
      for (const size_t k : group.members) {
        if (dys[k].defined()) group.joined->copy_from(k, dys[k]);
      }
    }
  }

  std::vector<at::Tensor> run() {
    weights_.each_chunk([&](const Weights& part) { run(part); });
    std::vector<at::Tensor> result;
    for (auto& sum : sums_) {
      result.push_back(sum ? executor_.results().of(sum->result(), options_.compute_dtype) : at::Tensor());
    }
    for (at::Tensor& gradient : gradients_.result()) result.push_back(std::move(gradient));
    return result;
  }

 private:
  // Only weights that some dgrad needs travel.
  std::vector<bool> needed_layers() const {
    std::vector<bool> needed(bundle_.shapes.size(), false);
    for (const Projection& projection : projections_) {
      if (needs_input_[projection.input]) needed[projection.layer] = true;
    }
    return needed;
  }

  void run(const Weights& part) {
    std::optional<ShardBundle> weights = part.bundle(), gradients = gradients_.bundle(part);
    const BackwardNeeds needs{.dgrad = weights.has_value(),
                              .wgrad = gradients.has_value(),
                              .bundle = kLinear.bundle,
                              .halves = halves(),
                              .permits = {.two_lanes = two_lanes(part), .groups = part.groups()}};
    const Schedule& schedule = backward_schedule(executor_, part.options(), weights, needs);
    Execution pass(executor_, schedule, std::move(weights), std::move(gradients), options_.name + " backward");
    while (const Step* step = pass.next()) {
      for (const InputProjections& group : groups_) {
        step->compute == Compute::wgrad ? wgrad(group, part, *step, pass) : dgrad(group, part, *step, pass);
      }
    }
  }

  bool halves() const { return options_.halves && !bundle_.shapes[0].transposed && !bundle_.shapes[0].frozen; }

  bool two_lanes(const Weights& part) const {
    const int multiprocessors = executor_.streams().multiprocessors();
    const int64_t tokens = inputs_[0].size(0);
    const int64_t features = bundle_.shapes[0].in_features;
    return wastes_last_wave(tokens, features, multiprocessors) ||
           wastes_last_wave(groups_[0].product_rows(weights_, part), features, multiprocessors);
  }

  void dgrad(const InputProjections& group, const Weights& part, const Step& step, Execution& pass) {
    if (!needs_input_[group.input]) return;
    const std::vector<at::Tensor> shards = pass.weight();
    std::vector<at::Tensor> dys, weights;
    for (const Half half : group.halves) {
      for (const size_t k : group.members) {
        const Projection& projection = projections_[k];
        const int weight = weights_.weight[projection.layer];
        const Overlap overlap(projection, part.rows(weight, step));
        const Overlap piece(projection, part.rows(weight, step.owner, half, step.owners));
        if (piece.rows == 0 || !dys_[k].defined()) continue;
        const at::Tensor rows = weights_.matrix(shards, projection.layer);
        dys.push_back(group.columns(k, piece, dys_[k]));
        weights.push_back(rows.narrow(0, overlap.row + piece.column - overlap.column, piece.rows));
      }
    }
    ProductSum& sum = *sums_[group.input];
    if (group.joined && !dys.empty()) {
      sum.add(joined_view(dys, 1), joined_rows(weights));
    } else {
      for (size_t i = 0; i < dys.size(); ++i) sum.add(dys[i], weights[i]);
    }
  }

  void wgrad(const InputProjections& group, const Weights& part, const Step& step, const Execution& pass) {
    const Gradients::Sums sums(gradients_, pass);
    std::vector<at::Tensor> outs, ins, dys;
    for (const size_t k : group.members) {
      const Projection& projection = projections_[k];
      const int weight = weights_.weight[projection.layer], bias = weights_.bias[projection.layer];
      const Overlap overlap(projection, part.rows(weight, step));
      if (sums.wants(weight) && overlap.rows > 0) {
        const LinearShape& shape = bundle_.shapes[projection.layer];
        const at::Tensor out = overlap.of_rows(outputs_first(sums.out(weight), shape));
        const at::Tensor arrived = overlap.of_rows(outputs_first(sums.arrived(weight), shape));
        if (dys_[k].defined()) {
          outs.push_back(out), ins.push_back(arrived), dys.push_back(group.columns(k, overlap, dys_[k]));
        } else {
          copy_or_zero(out, arrived);
        }
      }
      if (!sums.wants(bias)) continue;
      const Overlap of_bias(projection, part.rows(bias, step));
      if (of_bias.rows == 0) continue;
      const at::Tensor out = of_bias.of_rows(sums.out(bias)), arrived = of_bias.of_rows(sums.arrived(bias));
      if (dys_[k].defined()) {
        column_sum(out, arrived, of_bias.of_output(dys_[k]), sums.scale());
      } else {
        copy_or_zero(out, arrived);
      }
    }
    if (!outs.empty()) {
      add_products(outs, ins, dys, inputs_[group.input], sums.scale(), group.joined.has_value());
    }
  }

  Executor& executor_;
  const std::vector<at::Tensor>& dys_;
  const std::vector<at::Tensor>& inputs_;
  const LinearBundle& bundle_;
  const std::vector<Projection>& projections_;
  const std::vector<bool>& needs_input_;
  const RotationOptions& options_;
  LinearWeights weights_;
  Gradients gradients_;
  std::vector<std::optional<ProductSum>> sums_;  // by input: the sum of its gradient
  std::vector<InputProjections> groups_;         // by input
};

}  // namespace

ParameterFacts weight_facts(const LinearShape& shape) {
  const size_t outputs = shape.transposed ? 1 : 0;
  ParameterFacts facts{{shape.out_features, shape.in_features}, shape.by_outputs ? outputs : 1 - outputs, shape.frozen};
  if (shape.transposed) std::swap(facts.shape[0], facts.shape[1]);
  if (shape.frozen && shape.in_mlp) facts.group = block_layout(*shape.frozen).numbers;
  facts.codes = shape.codes;
  return facts;
}

void add_weight_gradient(const Gradients::Sums& sums, int parameter, const LinearShape& shape, const at::Tensor& left,
                         const at::Tensor& right) {
  if (!sums.wants(parameter)) return;
  gemm(outputs_first(sums.out(parameter), shape), outputs_first(sums.arrived(parameter), shape), left.t(), right,
       sums.scale());
}

void add_bias_gradient(const Gradients::Sums& sums, int parameter, const at::Tensor& values) {
  if (sums.wants(parameter)) column_sum(sums.out(parameter), sums.arrived(parameter), values, sums.scale());
}

int64_t sum_passes(at::ScalarType dtype) {
  return static_cast<int64_t>(2 * c10::elementSize(accumulation_dtype(dtype)) / c10::elementSize(dtype));
}

int64_t copied_rows(const Executor& executor, const Weights& weights, const std::vector<int>& places, int64_t features,
                    at::ScalarType dtype, const RotationOptions& options) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t own = 0, all = 0;
  bool gaps = false;
  for (int owner = 0; owner < executor.ranks(); ++owner) {
    int64_t rows = 0;
    for (const int place : places) {
      const int64_t count = weights.rows(place, owner).count;
      const bool ragged = weights.grouped() && count != weights.rows(place, 0).count;
      gaps =
          gaps || (place != places.back() && (ragged || aligned(count * features * bytes) != count * features * bytes));
      rows += count;
    }
    own = std::max(own, rows), all += rows;
  }
  if (!gaps && weights.grouped()) return 0;
  return (gaps ? all : own) * bytes / static_cast<int64_t>(c10::elementSize(options.compute_dtype));
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

std::vector<at::Tensor> linear_forward(Executor& executor, const std::vector<at::Tensor>& inputs,
                                       const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                       const std::vector<Projection>& projections, const RotationOptions& options) {
  const LinearWeights layers(executor, options, Pass::forward, bundle, parameters);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> added(bundle.shapes.size());  // by layer: the bias, if its shards have other rows
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    if (!bundle.biased[layer] || layers.cut_alike(layers.weight[layer], layers.bias[layer])) continue;
    added[layer] = at::empty({bundle.shapes[layer].out_features}, inputs[0].options());
  }
  for (const Projection& projection : projections) {
    const at::Tensor& x = inputs[projection.input];
    check_operand(executor, options, "an input", x, bundle.shapes[projection.layer].in_features);
    outputs.push_back(executor.results().empty({x.size(0), projection.end - projection.begin}, x.options()));
  }

  const std::vector<bool> used(projections.size(), true);
  std::vector<InputProjections> groups;
  for (size_t input = 0; input < inputs.size(); ++input) {
    groups.emplace_back(executor, layers, bundle, projections, input, inputs[input], used, OperandUse{}, Pass::forward,
                        options);
  }

  layers.each_chunk([&](const Weights& part) {
    ShardBundle weights = *part.bundle();
    const bool two_lanes =
        wastes_last_wave(inputs[0].size(0), groups[0].product_rows(layers, part), executor.streams().multiprocessors());
    const Permits permits{.two_lanes = two_lanes, .groups = part.groups()};
    const Schedule& schedule = forward_schedule(executor, part.options(), weights, permits);
    Execution pass(executor, schedule, std::move(weights), std::nullopt, options.name + " forward");
    while (const Step* step = pass.next()) {
      const std::vector<at::Tensor> shards = pass.weight();
      for (size_t layer = 0; layer < added.size(); ++layer) {
        const int bias = layers.bias[layer];
        if (added[layer].defined()) part.of(added[layer], 0, bias, step->owner, step->owners).copy_(shards[bias]);
      }
      for (const InputProjections& group : groups) {
        std::vector<at::Tensor> ys, rows, biases;
        for (const size_t k : group.members) {
          const Projection& projection = projections[k];
          const int weight = layers.weight[projection.layer], bias = layers.bias[projection.layer];
          const Overlap overlap(projection, part.rows(weight, *step));
          if (overlap.rows == 0) continue;
          const bool fused = bias >= 0 && !added[projection.layer].defined();
          ys.push_back(group.columns(k, overlap, outputs[k]));
          rows.push_back(overlap.of_rows(layers.matrix(shards, projection.layer)));
          biases.push_back(fused ? overlap.of_rows(shards[bias]) : at::Tensor());
        }
        const at::Tensor& x = inputs[group.input];
        if (group.joined && !ys.empty()) {
          gemm(joined_view(ys, 1), joined_biases(std::move(biases), rows), x, joined_rows(rows).t());
        } else {
          for (size_t i = 0; i < ys.size(); ++i) gemm(ys[i], biases[i], x, rows[i].t());
        }
      }
    }
  });
  for (const InputProjections& group : groups) {
    if (!group.joined) continue;
    for (const size_t k : group.members) group.joined->copy_to(k, outputs[k]);
  }
  for (size_t k = 0; k < projections.size(); ++k) {
    const Projection& projection = projections[k];
    if (!added[projection.layer].defined()) continue;
    outputs[k].add_(added[projection.layer].narrow(0, projection.begin, projection.end - projection.begin));
  }
  return outputs;
}

std::vector<at::Tensor> linear_backward(Executor& executor, const std::vector<at::Tensor>& dys,
                                        const std::vector<at::Tensor>& inputs,
                                        const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                        const std::vector<Projection>& projections,
                                        const std::vector<bool>& needs_input, const std::vector<bool>& needs_parameter,
                                        const RotationOptions& options) {
  return BundleBackward(executor, dys, inputs, parameters, bundle, projections, needs_input, needs_parameter, options)
      .run();
}

}  // namespace rtp
