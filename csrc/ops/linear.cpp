#include "ops/linear.h"

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

constexpr OperationKind kLinear = operation_kind("linear");

// The parameters of a bundle in one pass, and the places of every layer's weight and bias.
struct LinearWeights : Weights {
  // `needed`: by layer, whether its weight travels; empty: all.
  LinearWeights(const Executor& executor, const RotationOptions& options, Pass pass, const LinearBundle& bundle,
                const std::vector<at::Tensor>& parameters, const std::vector<bool>& needed = {})
      : Weights(executor, options, kLinear, pass, parameters) {
    for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
      const LinearShape& shape = bundle.shapes[layer];
      RTP_CHECK_VALUE(!shape.transposed || !shape.frozen, options.name, ": expected a frozen weight stored [out, in]");
      weight.push_back(add(weight_facts(shape), true, needed.empty() || needed[layer]));
      bias.push_back(add({{shape.out_features}}, bundle.biased[layer]));
    }
  }

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

// Route gather requires that the cut dimension is the first one, and weights in the compute dtype.
void check_route(const LinearBundle& bundle, const RotationOptions& options) {
  for (const LinearShape& shape : bundle.shapes) {
    RTP_CHECK_VALUE(options.route != Route::gather || !shape.frozen, options.name,
                    ": expected a weight in a floating dtype for route gather, got a frozen one in blocks");
  }
  RTP_CHECK_VALUE(options.route != Route::gather || !bundle.shapes[0].transposed, options.name,
                  ": expected a weight stored [out, in] for route gather, got one stored [in, out]");
}

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
    for (size_t k = 0; k < projections.size(); ++k) {
      const Projection& projection = projections[k];
      const int64_t outputs = projection.end - projection.begin;
      if (dys[k].defined()) check_operand(executor, options, "an output gradient", dys[k], outputs);
      if (!needs_input[projection.input] || sums_[projection.input]) continue;
      const at::Tensor& x = inputs[projection.input];
      const int64_t features = bundle.shapes[projection.layer].in_features;
      sums_[projection.input].emplace(x.size(0), features, x.options().dtype(options.compute_dtype));
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
                              .halves = options_.halves && !bundle_.shapes[0].transposed,
                              .permits = {.two_lanes = two_lanes(part), .groups = part.groups()}};
    const Schedule& schedule = backward_schedule(executor_, part.options(), weights, needs);
    Execution pass(executor_, schedule, std::move(weights), std::move(gradients), options_.name + " backward");
    while (const Step* step = pass.next()) {
      for (size_t k = 0; k < projections_.size(); ++k) {
        const size_t layer = projections_[k].layer;
        const Overlap rows(projections_[k], part.rows(weights_.weight[layer], *step));
        if (step->compute == Compute::wgrad) {
          const int bias = weights_.bias[layer];
          wgrad(k, rows, bias < 0 ? rows : Overlap(projections_[k], part.rows(bias, *step)), pass);
        } else if (rows.rows > 0) {
          dgrad(k, rows, pass);
        }
      }
    }
  }

  bool two_lanes(const Weights& part) const {
    const int multiprocessors = executor_.streams().multiprocessors();
    const int64_t tokens = inputs_[0].size(0);
    const int64_t features = bundle_.shapes[0].in_features;
    return wastes_last_wave(tokens, features, multiprocessors) ||
           wastes_last_wave(part.rows(0, 0).count, features, multiprocessors);
  }

  void dgrad(size_t k, const Overlap& overlap, Execution& pass) {
    const Projection& projection = projections_[k];
    if (!needs_input_[projection.input] || !dys_[k].defined()) return;
    const at::Tensor stored = pass.weight()[weights_.index(weights_.weight[projection.layer])];
    const at::Tensor weight = outputs_first(stored, bundle_.shapes[projection.layer]);
    sums_[projection.input]->add(overlap.of_output(dys_[k]), overlap.of_rows(weight));
  }

  void wgrad(size_t k, const Overlap& overlap, const Overlap& of_bias, const Execution& pass) {
    const Projection& projection = projections_[k];
    const Gradients::Sums sums(gradients_, pass);
    const int weight = weights_.weight[projection.layer];
    if (sums.wants(weight) && overlap.rows > 0) {
      const LinearShape& shape = bundle_.shapes[projection.layer];
      const at::Tensor out = overlap.of_rows(outputs_first(sums.out(weight), shape));
      const at::Tensor arrived = overlap.of_rows(outputs_first(sums.arrived(weight), shape));
      if (dys_[k].defined()) {
        gemm(out, arrived, overlap.of_output(dys_[k]).t(), inputs_[projection.input], sums.scale());
      } else {
        copy_or_zero(out, arrived);
      }
    }
    const int bias = weights_.bias[projection.layer];
    if (sums.wants(bias) && of_bias.rows > 0) {
      const at::Tensor out = of_bias.of_rows(sums.out(bias)), arrived = of_bias.of_rows(sums.arrived(bias));
      if (dys_[k].defined()) {
        column_sum(out, arrived, of_bias.of_output(dys_[k]), sums.scale());
      } else {
        copy_or_zero(out, arrived);
      }
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
};

}  // namespace

ParameterFacts weight_facts(const LinearShape& shape) {
  const size_t outputs = shape.transposed ? 1 : 0;
  ParameterFacts facts{{shape.out_features, shape.in_features}, shape.by_outputs ? outputs : 1 - outputs, shape.frozen};
  if (shape.transposed) std::swap(facts.shape[0], facts.shape[1]);
  if (shape.frozen && shape.in_mlp) facts.group = block_layout(*shape.frozen).numbers;
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
  check_route(bundle, options);
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

  layers.each_chunk([&](const Weights& part) {
    ShardBundle weights = *part.bundle();
    const bool two_lanes =
        wastes_last_wave(inputs[0].size(0), part.rows(0, 0).count, executor.streams().multiprocessors());
    const Permits permits{.two_lanes = two_lanes, .groups = part.groups()};
    const Schedule& schedule = forward_schedule(executor, part.options(), weights, permits);
    Execution pass(executor, schedule, std::move(weights), std::nullopt, options.name + " forward");
    while (const Step* step = pass.next()) {
      const std::vector<at::Tensor> shards = pass.weight();
      for (size_t layer = 0; layer < added.size(); ++layer) {
        const int bias = layers.bias[layer];
        if (added[layer].defined()) part.of(added[layer], 0, bias, step->owner, step->owners).copy_(shards[bias]);
      }
      for (size_t k = 0; k < projections.size(); ++k) {
        const Projection& projection = projections[k];
        const int weight = layers.weight[projection.layer], bias = layers.bias[projection.layer];
        const Overlap overlap(projection, part.rows(weight, *step));
        if (overlap.rows == 0) continue;
        const bool fused = bias >= 0 && !added[projection.layer].defined();
        gemm(overlap.of_output(outputs[k]), fused ? overlap.of_rows(shards[bias]) : at::Tensor(),
             inputs[projection.input],
             overlap.of_rows(outputs_first(shards[weight], bundle.shapes[projection.layer])).t());
      }
    }
  });
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
