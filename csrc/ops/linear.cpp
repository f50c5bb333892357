#include "ops/linear.h"

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

enum class Kind : uint8_t { weight, bias };

// Sizes and starts of every owner's shard of the weight of each layer, or of its bias, for whole shards, one chunk or
// one half. The two differ for frozen weights whose groups have several rows.
struct BundleCut {
  BundleCut(const LinearBundle& bundle, int ranks, Kind kind) {
    for (const LinearShape& shape : bundle.shapes) {
      sizes.push_back(kind == Kind::weight ? cut_features(shape, ranks) : shard_sizes(shape.out_features, ranks));
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

// The cuts of the weights and biases of a bundle.
struct Cuts {
  Cuts(const LinearBundle& bundle, int ranks) : weight(bundle, ranks, Kind::weight), bias(bundle, ranks, Kind::bias) {}
  template <typename Part>
  Cuts(const Cuts& all, const Part& part) : weight(all.weight, part), bias(all.bias, part) {}

  bool differ(size_t layer) const { return weight.sizes[layer] != bias.sizes[layer]; }

  BundleCut weight, bias;
};

// Returns the chunks of a bundle, one pass each: a single chunk except for a single layer above the slot cap, such as a
// vocabulary head.
std::vector<Chunk> bundle_chunks(const LinearBundle& bundle, const Cuts& cuts, const RotationOptions& options) {
  const LinearShape& shape = bundle.shapes[0];
  RotationOptions uncapped = options;
  if (bundle.shapes.size() > 1 || shape.transposed || shape.frozen) uncapped.slot_cap = 0;
  return chunks_of(uncapped, cuts.weight.sizes[0], shape.in_features + (bundle.biased[0] ? 1 : 0));
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

std::vector<TensorLayout> layouts_of(const LinearBundle& bundle, const Cuts& cuts, at::ScalarType dtype) {
  std::vector<TensorLayout> layouts;
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    layouts.push_back(weight_layout(bundle.shapes[layer], cuts.weight.sizes[layer], dtype));
    if (bundle.biased[layer]) layouts.push_back(bias_layout(bundle.shapes[layer], cuts.bias.sizes[layer], dtype));
  }
  return layouts;
}

// Checks the local shards of a bundle. Returns them as they travel.
std::vector<at::Tensor> travelling_shards(const Executor& executor, const RotationOptions& options,
                                          const LinearBundle& bundle, const Places& places,
                                          const std::vector<TensorLayout>& layouts,
                                          std::vector<at::Tensor> parameters) {
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    const LinearShape& shape = bundle.shapes[layer];
    const int weight = places.weight[layer], bias = places.bias[layer];
    if (bias >= 0) check_local(executor, options, "bias", parameters[bias], layouts[bias]);
    RTP_CHECK_VALUE(!shape.transposed || !shape.frozen, options.name, ": expected a frozen weight stored [out, in]");
    parameters[weight] = travelling_local(executor, options, "weight", parameters[weight], layouts[weight]);
  }
  return parameters;
}

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
        whole_(bundle, executor.ranks()),
        places_(bundle),
        parameters_(travelling_shards(executor, options, bundle, places_,
                                      layouts_of(bundle, whole_, options.compute_dtype), parameters)),
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
    const Cuts cuts = chunk.single ? whole_ : Cuts(whole_, chunk);
    const auto mine = [&](const at::Tensor& shard) { return chunk.of(shard, executor_.rank()); };
    const std::vector<TensorLayout> layouts = layouts_of(bundle_, cuts, options_.compute_dtype);
    std::optional<ShardBundle> gradients = gradients_.bundle(layouts_of(bundle_, cuts, options_.reduce_dtype), mine);
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
                              .two_streams = two_streams(cuts.weight)};
    std::optional<ShardBundle> weight;
    if (needs.dgrad) weight = travelling_weights(executor_, options_, std::move(weights), std::move(local));
    const Schedule& schedule = backward_schedule(executor_, chunked(options_, chunk), weight, needs);
    Execution pass(executor_, schedule, std::move(weight), std::move(gradients), options_.name + " backward");
    const Cuts halves[] = {cuts, Cuts(cuts, Half::first), Cuts(cuts, Half::second)};
    while (const Step* step = pass.next()) {
      const Cuts& part = halves[static_cast<size_t>(step->half)];
      for (size_t k = 0; k < projections_.size(); ++k) {
        const Overlap rows(projections_[k], part.weight, step->owner);
        if (step->compute == Compute::wgrad) {
          wgrad(k, rows, Overlap(projections_[k], part.bias, step->owner), pass);
        } else if (rows.rows > 0) {
          dgrad(k, rows, pass);
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

  void wgrad(size_t k, const Overlap& overlap, const Overlap& of_bias, const Execution& pass) {
    const Projection& projection = projections_[k];
    const Gradients::Sums sums(gradients_, pass);
    const int weight = places_.weight[projection.layer];
    if (sums.wants(weight) && overlap.rows > 0) {
      const auto rows = [&](const at::Tensor& sum) { return sum.defined() ? overlap.of_rows(sum) : sum; };
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
    if (sums.wants(bias) && of_bias.rows > 0) {
      const auto rows = [&](const at::Tensor& sum) { return sum.defined() ? of_bias.of_rows(sum) : sum; };
      const at::Tensor out = rows(sums.out(bias)), arrived = rows(sums.arrived(bias));
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
  Cuts whole_;
  Places places_;
  std::vector<at::Tensor> parameters_;
  Gradients gradients_;
  std::vector<int> weight_place_;  // by layer: place of its weight among those that travel; -1: does not travel
  std::vector<std::optional<ProductSum>> sums_;  // by input: the sum of its gradient
};

}  // namespace

std::vector<int64_t> cut_features(const LinearShape& shape, int ranks) {
  int64_t left = shape.by_outputs ? shape.out_features : shape.in_features;
  if (!shape.frozen) return shard_sizes(left, ranks);
  const bool by_blocks = shape.in_mlp || !shape.by_outputs;
  const int64_t group =
      by_blocks ? block_layout(*shape.frozen).numbers : rows_of_blocks(*shape.frozen, shape.in_features);
  std::vector<int64_t> sizes = shard_sizes((left + group - 1) / group, ranks);
  for (int64_t& size : sizes) left -= size = std::min(size * group, left);
  return sizes;
}

TensorLayout weight_layout(const LinearShape& shape, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t outputs = shape.out_features;
  const int64_t inputs = shape.in_features;
  TensorLayout layout = shape.transposed ? cut_layout(dtype, {inputs, outputs}, shape.by_outputs ? 1 : 0, sizes)
                                         : cut_layout(dtype, {outputs, inputs}, shape.by_outputs ? 0 : 1, sizes);
  layout.frozen = shape.frozen;
  return layout;
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
  const Cuts whole(bundle, executor.ranks());
  const Places places(bundle);
  check_route(bundle, options);
  const std::vector<at::Tensor> shards = travelling_shards(
      executor, options, bundle, places, layouts_of(bundle, whole, options.compute_dtype), parameters);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> added(bundle.shapes.size());  // by layer: the bias, if its shards have other rows
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    if (!bundle.biased[layer] || !whole.differ(layer)) continue;
    added[layer] = at::empty({bundle.shapes[layer].out_features}, inputs[0].options());
  }
  for (const Projection& projection : projections) {
    const at::Tensor& x = inputs[projection.input];
    check_operand(executor, options, "an input", x, bundle.shapes[projection.layer].in_features);
    outputs.push_back(executor.results().empty({x.size(0), projection.end - projection.begin}, x.options()));
  }

  for (const Chunk& chunk : bundle_chunks(bundle, whole, options)) {
    const Cuts cuts = chunk.single ? whole : Cuts(whole, chunk);
    ShardBundle weights = travelling_weights(executor, options, layouts_of(bundle, cuts, options.compute_dtype),
                                             chunk.of(shards, executor.rank()));
    const bool two_streams =
        wastes_last_wave(inputs[0].size(0), cuts.weight.most(0), executor.streams().multiprocessors());
    const Schedule& schedule = forward_schedule(executor, chunked(options, chunk), weights, two_streams);
    Execution pass(executor, schedule, std::move(weights), std::nullopt, options.name + " forward");
    while (const Step* step = pass.next()) {
      const std::vector<at::Tensor> shards = pass.weight();
      for (size_t layer = 0; layer < added.size(); ++layer) {
        if (!added[layer].defined()) continue;
        const int64_t first = cuts.bias.start(layer, step->owner), last = cuts.bias.end(layer, step->owner);
        added[layer].narrow(0, first, last - first).copy_(shards[places.bias[layer]]);
      }
      for (size_t k = 0; k < projections.size(); ++k) {
        const Projection& projection = projections[k];
        const Overlap overlap(projection, cuts.weight, step->owner);
        if (overlap.rows == 0) continue;
        const bool fused = bundle.biased[projection.layer] && !added[projection.layer].defined();
        const at::Tensor weight =
            outputs_first(shards[places.weight[projection.layer]], bundle.shapes[projection.layer]);
        gemm(overlap.of_output(outputs[k]),
             fused ? overlap.of_rows(shards[places.bias[projection.layer]]) : at::Tensor(), inputs[projection.input],
             overlap.of_rows(weight).t());
      }
    }
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
