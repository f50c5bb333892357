#include "ops/linear.h"

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

// Sizes and starts of every owner's shard of each layer, for whole shards, one chunk or one half.
struct BundleCut {
  BundleCut(const LinearBundle& bundle, int ranks) {
    for (const LinearShape& shape : bundle.shapes) {
      sizes.push_back(shard_sizes(shape.out_features, ranks));
      starts.push_back(shard_starts(sizes.back()));
    }
  }
  BundleCut(const BundleCut& whole, const Chunk& chunk) : sizes{chunk.sizes}, starts(whole.starts) {
    for (size_t owner = 0; owner < chunk.offsets.size(); ++owner) starts[0][owner] += chunk.offsets[owner];
  }
  BundleCut(const BundleCut& all, Half half) : BundleCut(all) {
    for (size_t layer = 0; layer < sizes.size(); ++layer) {
      for (size_t owner = 0; owner < sizes[layer].size(); ++owner) {
        const Rows rows = half_rows(half, sizes[layer][owner]);
        sizes[layer][owner] = rows.count;
        starts[layer][owner] += rows.first;
      }
    }
  }

  int64_t start(size_t layer, int owner) const { return owner == kAllOwners ? 0 : starts[layer][owner]; }
  int64_t end(size_t layer, int owner) const {
    if (owner == kAllOwners) owner = static_cast<int>(sizes[layer].size()) - 1;
    return starts[layer][owner] + sizes[layer][owner];
  }
  int64_t most(size_t layer) const { return *std::max_element(sizes[layer].begin(), sizes[layer].end()); }

  std::vector<std::vector<int64_t>> sizes, starts;  // by layer and owner
};

// Returns the chunks of a bundle, one pass each: a single chunk except for a single layer above the slot cap, such as a
// vocabulary head.
std::vector<Chunk> bundle_chunks(const LinearBundle& bundle, const BundleCut& cut, const RotationOptions& options) {
  const LinearShape& shape = bundle.shapes[0];
  RotationOptions uncapped = options;
  if (bundle.shapes.size() > 1 || shape.transposed) uncapped.slot_cap = 0;
  return chunks_of(uncapped, cut.sizes[0], shape.in_features + (bundle.biased[0] ? 1 : 0));
}

// The overlap of a projection with the shard of one owner, or of all.
struct Overlap {
  Overlap(const Projection& projection, const BundleCut& cut, int owner) {
    const int64_t start = cut.start(projection.layer, owner);
    const int64_t begin = std::max(projection.begin, start);
    rows = std::max<int64_t>(std::min(projection.end, cut.end(projection.layer, owner)) - begin, 0);
    row = begin - start;
    column = begin - projection.begin;
  }

  at::Tensor of_output(const at::Tensor& y) const { return y.narrow(1, column, rows); }
  at::Tensor of_rows(const at::Tensor& shard) const { return shard.narrow(0, row, rows); }

  int64_t rows = 0;    // number of rows
  int64_t row = 0;     // first row in the shard
  int64_t column = 0;  // first column in the output
};

// The place of every layer's weight and bias among the parameters; -1: absent.
struct Places {
  explicit Places(const LinearBundle& bundle) {
    for (const bool has_bias : bundle.biased) {
      weight.push_back(count++);
      bias.push_back(has_bias ? count++ : -1);
    }
  }

  std::vector<int> weight, bias;
  int count = 0;
};

std::vector<TensorLayout> layouts_of(const LinearBundle& bundle, const BundleCut& cut, at::ScalarType dtype) {
  std::vector<TensorLayout> layouts;
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    layouts.push_back(weight_layout(bundle.shapes[layer], cut.sizes[layer], dtype));
    if (bundle.biased[layer]) layouts.push_back(bias_layout(bundle.shapes[layer], cut.sizes[layer], dtype));
  }
  return layouts;
}

// Route gather requires that the cut dimension is the first one.
void check_route(const LinearBundle& bundle, const RotationOptions& options) {
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
        parameters_(parameters),
        bundle_(bundle),
        projections_(projections),
        needs_input_(needs_input),
        options_(options),
        whole_(bundle, executor.ranks()),
        places_(bundle),
        gradients_(executor, options, layouts_of(bundle, whole_, options.reduce_dtype), needs_parameter),
        weight_place_(bundle.shapes.size(), -1),
        sums_(inputs.size()) {
    // Only weights that some dgrad needs and only the needed gradients travel.
    for (size_t k = 0; k < projections.size(); ++k) {
      const Projection& projection = projections[k];
      const int64_t outputs = projection.end - projection.begin;
      if (dys[k].defined()) check_operand(executor, options, "an output gradient", dys[k], outputs);
      if (!needs_input[projection.input]) continue;
      weight_place_[projection.layer] = 0;
      if (sums_[projection.input]) continue;
      const at::Tensor& x = inputs[projection.input];
      const int64_t features = bundle.shapes[projection.layer].in_features;
      sums_[projection.input].emplace(x.size(0), features, x.options().dtype(options.compute_dtype));
    }
    int weights = 0;
    for (int& place : weight_place_) {
      if (place == 0) place = weights++;
    }
  }

  std::vector<at::Tensor> run() {
    for (const Chunk& chunk : bundle_chunks(bundle_, whole_, options_)) run(chunk);
    std::vector<at::Tensor> result;
    for (auto& sum : sums_) {
      result.push_back(sum ? executor_.results().of(sum->result(), options_.compute_dtype) : at::Tensor());
    }
    for (at::Tensor& gradient : gradients_.result()) result.push_back(std::move(gradient));
    return result;
  }

 private:
  void run(const Chunk& chunk) {
    const BundleCut cut = chunk.single ? whole_ : BundleCut(whole_, chunk);
    const auto mine = [&](const at::Tensor& shard) { return chunk.of(shard, executor_.rank()); };
    const std::vector<TensorLayout> layouts = layouts_of(bundle_, cut, options_.compute_dtype);
    std::optional<ShardBundle> gradients = gradients_.bundle(layouts_of(bundle_, cut, options_.reduce_dtype), mine);
    std::vector<TensorLayout> weights;
    std::vector<at::Tensor> local;
    for (size_t layer = 0; layer < weight_place_.size(); ++layer) {
      if (weight_place_[layer] < 0) continue;
      weights.push_back(layouts[places_.weight[layer]]);
      local.push_back(mine(parameters_[places_.weight[layer]]));
    }
    const BackwardNeeds needs{.dgrad = !weights.empty(),
                              .wgrad = gradients.has_value(),
                              .halves = options_.halves && !bundle_.shapes[0].transposed,
                              .two_streams = two_streams(cut)};
    std::optional<ShardBundle> weight;
    if (needs.dgrad) weight = travelling_weights(executor_, options_, std::move(weights), std::move(local));
    const Schedule& schedule = backward_schedule(executor_, chunked(options_, chunk), weight, needs);
    Execution pass(executor_, schedule, std::move(weight), std::move(gradients), options_.name + " backward");
    const BundleCut halves[] = {cut, BundleCut(cut, Half::first), BundleCut(cut, Half::second)};
    while (const Step* step = pass.next()) {
      for (size_t k = 0; k < projections_.size(); ++k) {
        const Overlap overlap(projections_[k], halves[static_cast<size_t>(step->half)], step->owner);
        if (overlap.rows == 0) continue;
        if (step->compute == Compute::dgrad) {
          dgrad(k, overlap, pass);
        } else {
          wgrad(k, overlap, pass);
        }
      }
    }
  }

  bool two_streams(const BundleCut& cut) const {
    const int multiprocessors = executor_.streams().multiprocessors();
    const int64_t tokens = inputs_[0].size(0);
    const int64_t features = bundle_.shapes[0].in_features;
    return wastes_last_wave(tokens, features, multiprocessors) ||
           wastes_last_wave(cut.most(0), features, multiprocessors);
  }

  void dgrad(size_t k, const Overlap& overlap, Execution& pass) {
    const Projection& projection = projections_[k];
    if (!needs_input_[projection.input] || !dys_[k].defined()) return;
    const at::Tensor stored = pass.weight()[weight_place_[projection.layer]];
    const at::Tensor weight = outputs_first(stored, bundle_.shapes[projection.layer]);
    sums_[projection.input]->add(overlap.of_output(dys_[k]), overlap.of_rows(weight));
  }

  void wgrad(size_t k, const Overlap& overlap, const Execution& pass) {
    const Projection& projection = projections_[k];
    const Gradients::Sums sums(gradients_, pass);
    const auto rows = [&](const at::Tensor& sum) { return sum.defined() ? overlap.of_rows(sum) : sum; };
    const int weight = places_.weight[projection.layer];
    if (sums.wants(weight)) {
      const LinearShape& shape = bundle_.shapes[projection.layer];
      const at::Tensor out = rows(outputs_first(sums.out(weight), shape));
      const at::Tensor arrived = rows(outputs_first(sums.arrived(weight), shape));
      if (dys_[k].defined()) {
        gemm(out, arrived, overlap.of_output(dys_[k]).t(), inputs_[projection.input], sums.scale());
      } else {
        copy_or_zero(out, arrived);
      }
    }
    const int bias = places_.bias[projection.layer];
    if (sums.wants(bias)) {
      const at::Tensor out = rows(sums.out(bias)), arrived = rows(sums.arrived(bias));
      if (dys_[k].defined()) {
        column_sum(out, arrived, overlap.of_output(dys_[k]), sums.scale());
      } else {
        copy_or_zero(out, arrived);
      }
    }
  }

  Executor& executor_;
  const std::vector<at::Tensor>& dys_;
  const std::vector<at::Tensor>& inputs_;
  const std::vector<at::Tensor>& parameters_;
  const LinearBundle& bundle_;
  const std::vector<Projection>& projections_;
  const std::vector<bool>& needs_input_;
  const RotationOptions& options_;
  BundleCut whole_;
  Places places_;
  Gradients gradients_;
  std::vector<int> weight_place_;  // by layer: place of its weight among those that travel; -1: does not travel
  std::vector<std::optional<ProductSum>> sums_;  // by input: the sum of its gradient
};

}  // namespace

TensorLayout weight_layout(const LinearShape& shape, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t outputs = shape.out_features;
  const int64_t inputs = shape.in_features;
  if (shape.transposed) return cut_layout(dtype, {inputs, outputs}, shape.by_outputs ? 1 : 0, sizes);
  return cut_layout(dtype, {outputs, inputs}, shape.by_outputs ? 0 : 1, sizes);
}

TensorLayout bias_layout(const LinearShape& shape, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return cut_layout(dtype, {shape.out_features}, 0, sizes);
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
  const BundleCut whole(bundle, executor.ranks());
  const Places places(bundle);
  const std::vector<TensorLayout> layouts = layouts_of(bundle, whole, options.compute_dtype);
  for (size_t index = 0; index < layouts.size(); ++index) {
    check_local(executor, options, layouts[index].shapes[0].size() == 1 ? "bias" : "weight", parameters[index],
                layouts[index]);
  }
  check_route(bundle, options);
  std::vector<at::Tensor> outputs;
  for (const Projection& projection : projections) {
    const at::Tensor& x = inputs[projection.input];
    check_operand(executor, options, "an input", x, bundle.shapes[projection.layer].in_features);
    outputs.push_back(executor.results().empty({x.size(0), projection.end - projection.begin}, x.options()));
  }

  for (const Chunk& chunk : bundle_chunks(bundle, whole, options)) {
    const BundleCut cut = chunk.single ? whole : BundleCut(whole, chunk);
    ShardBundle weights = travelling_weights(executor, options, layouts_of(bundle, cut, options.compute_dtype),
                                             chunk.of(parameters, executor.rank()));
    const bool two_streams = wastes_last_wave(inputs[0].size(0), cut.most(0), executor.streams().multiprocessors());
    const Schedule& schedule = forward_schedule(executor, chunked(options, chunk), weights, two_streams);
    Execution pass(executor, schedule, std::move(weights), std::nullopt, options.name + " forward");
    while (const Step* step = pass.next()) {
      const std::vector<at::Tensor> shards = pass.weight();
      for (size_t k = 0; k < projections.size(); ++k) {
        const Projection& projection = projections[k];
        const Overlap overlap(projection, cut, step->owner);
        if (overlap.rows == 0) continue;
        const int bias = places.bias[projection.layer];
        const at::Tensor weight =
            outputs_first(shards[places.weight[projection.layer]], bundle.shapes[projection.layer]);
        gemm(overlap.of_output(outputs[k]), bias >= 0 ? overlap.of_rows(shards[bias]) : at::Tensor(),
             inputs[projection.input], overlap.of_rows(weight).t());
      }
    }
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
