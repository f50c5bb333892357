#include "ops/linear.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "ops/gemm.h"

namespace rtp {
namespace {

// Where every owner's shard of each layer lies.
struct BundleCut {
  BundleCut(const LinearBundle& bundle, int ranks) {
    for (const LinearShape& shape : bundle.shapes) {
      sizes.push_back(shard_sizes(shape.out_features, ranks));
      starts.push_back(shard_starts(sizes.back()));
    }
  }

  std::vector<std::vector<int64_t>> sizes, starts;  // of each layer, by owner
};

// What a projection has in common with the shard of one owner.
struct Overlap {
  Overlap(const Projection& projection, const BundleCut& cut, int owner) {
    const int64_t start = cut.starts[projection.layer][owner];
    const int64_t begin = std::max(projection.begin, start);
    rows = std::max<int64_t>(std::min(projection.end, start + cut.sizes[projection.layer][owner]) - begin, 0);
    row = begin - start;
    column = begin - projection.begin;
  }

  at::Tensor of_output(const at::Tensor& y) const { return y.narrow(1, column, rows); }
  at::Tensor of_rows(const at::Tensor& shard) const { return shard.narrow(0, row, rows); }

  int64_t rows = 0;    // how many
  int64_t row = 0;     // the first one, in the shard
  int64_t column = 0;  // the first one, in the output
};

// The place of every layer's weight and bias among the parameters; -1: not there.
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

std::vector<Part> parts_of(const LinearBundle& bundle, const BundleCut& cut, at::ScalarType dtype) {
  std::vector<Part> parts;
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    parts.push_back(weight_part(bundle.shapes[layer], cut.sizes[layer], dtype));
    if (bundle.biased[layer]) parts.push_back(bias_part(bundle.shapes[layer], cut.sizes[layer], dtype));
  }
  return parts;
}

}  // namespace

Part weight_part(const LinearShape& shape, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t outputs = shape.out_features;
  const int64_t inputs = shape.in_features;
  if (shape.transposed) return cut_part(dtype, {inputs, outputs}, shape.by_outputs ? 1 : 0, sizes);
  return cut_part(dtype, {outputs, inputs}, shape.by_outputs ? 0 : 1, sizes);
}

Part bias_part(const LinearShape& shape, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return cut_part(dtype, {shape.out_features}, 0, sizes);
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
  const BundleCut cut(bundle, executor.ranks());
  const Places places(bundle);
  Cargo cargo{parts_of(bundle, cut, options.compute_dtype), parameters};
  for (size_t part = 0; part < cargo.parts.size(); ++part) {
    const bool is_bias = cargo.parts[part].shapes[0].size() == 1;
    check_home(executor, options, is_bias ? "bias" : "weight", cargo.home[part], cargo.parts[part]);
  }
  std::vector<at::Tensor> outputs;
  for (const Projection& projection : projections) {
    const at::Tensor& x = inputs[projection.input];
    check_operand(executor, options, "an input", x, bundle.shapes[projection.layer].in_features);
    outputs.push_back(at::empty({x.size(0), projection.end - projection.begin}, x.options()));
  }

  const Schedule schedule = forward_schedule(executor, options, cargo);
  Execution pass(executor, schedule, std::move(cargo), std::nullopt, options.name + " forward");
  while (const Step* step = pass.next()) {
    const auto shards = pass.weight();
    for (size_t k = 0; k < projections.size(); ++k) {
      const Projection& projection = projections[k];
      const Overlap overlap(projection, cut, step->owner);
      if (overlap.rows == 0) continue;
      const int bias = places.bias[projection.layer];
      const at::Tensor weight = outputs_first(shards[places.weight[projection.layer]], bundle.shapes[projection.layer]);
      gemm(overlap.of_output(outputs[k]), bias >= 0 ? overlap.of_rows(shards[bias]) : at::Tensor(),
           inputs[projection.input], overlap.of_rows(weight).t());
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
  const BundleCut cut(bundle, executor.ranks());
  const Places places(bundle);
  const double scale = 1.0 / executor.ranks();

  // Only the weights that some dgrad multiplies with travel, and only the gradients that are wanted.
  std::vector<bool> travels(bundle.shapes.size(), false);
  std::vector<std::optional<ProductSum>> sums(inputs.size());
  for (size_t k = 0; k < projections.size(); ++k) {
    const Projection& projection = projections[k];
    const LinearShape& shape = bundle.shapes[projection.layer];
    if (dys[k].defined())
      check_operand(executor, options, "an output gradient", dys[k], projection.end - projection.begin);
    if (!needs_input[projection.input]) continue;
    travels[projection.layer] = true;
    if (!sums[projection.input]) {
      const at::Tensor& x = inputs[projection.input];
      sums[projection.input].emplace(x.size(0), shape.in_features, x.options().dtype(options.compute_dtype));
    }
  }
  const std::vector<Part> parts = parts_of(bundle, cut, options.compute_dtype);
  std::optional<Cargo> weights;
  std::vector<int> weight_place(bundle.shapes.size(), -1);
  for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
    if (!travels[layer]) continue;
    if (!weights) weights.emplace();
    weight_place[layer] = static_cast<int>(weights->parts.size());
    weights->parts.push_back(parts[places.weight[layer]]);
    weights->home.push_back(parameters[places.weight[layer]]);
  }
  std::vector<Part> gradient_parts;
  std::vector<int> gradient_place(parts.size(), -1);
  const std::vector<Part> all_gradients = parts_of(bundle, cut, options.reduce_dtype);
  for (size_t part = 0; part < parts.size(); ++part) {
    if (!needs_parameter[part]) continue;
    gradient_place[part] = static_cast<int>(gradient_parts.size());
    gradient_parts.push_back(all_gradients[part]);
  }
  std::optional<Cargo> gradients;
  if (!gradient_parts.empty()) gradients = gradient_cargo(executor, std::move(gradient_parts));
  const std::vector<at::Tensor> home = gradients ? gradients->home : std::vector<at::Tensor>{};

  const Schedule schedule =
      backward_schedule(executor, options, weights, {.dgrad = weights.has_value(), .wgrad = gradients.has_value()});
  Execution pass(executor, schedule, std::move(weights), std::move(gradients), options.name + " backward");
  while (const Step* step = pass.next()) {
    const bool dgrad = step->compute == Compute::dgrad;
    const auto shards = dgrad ? pass.weight() : std::vector<at::Tensor>{};
    const auto in = dgrad ? std::vector<at::Tensor>{} : pass.gradient_in();
    const auto out = dgrad ? std::vector<at::Tensor>{} : pass.gradient_out();
    for (size_t k = 0; k < projections.size(); ++k) {
      const Projection& projection = projections[k];
      const LinearShape& shape = bundle.shapes[projection.layer];
      const Overlap overlap(projection, cut, step->owner);
      if (overlap.rows == 0) continue;
      if (dgrad) {
        if (!needs_input[projection.input] || !dys[k].defined()) continue;
        const at::Tensor weight = outputs_first(shards[weight_place[projection.layer]], shape);
        sums[projection.input]->add(overlap.of_output(dys[k]), overlap.of_rows(weight));
        continue;
      }
      const auto arrived = [&in](int place) { return in.empty() ? at::Tensor() : in[place]; };
      const int weight = gradient_place[places.weight[projection.layer]];
      if (weight >= 0) {
        const auto rows = [&](const at::Tensor& stored) {
          return stored.defined() ? overlap.of_rows(outputs_first(stored, shape)) : stored;
        };
        if (dys[k].defined()) {
          gemm(rows(out[weight]), rows(arrived(weight)), overlap.of_output(dys[k]).t(), inputs[projection.input],
               scale);
        } else {
          pass_on(rows(out[weight]), rows(arrived(weight)));
        }
      }
      const int place = places.bias[projection.layer];
      const int bias = place < 0 ? -1 : gradient_place[place];
      if (bias >= 0) {
        const at::Tensor in_rows = in.empty() ? at::Tensor() : overlap.of_rows(in[bias]);
        if (dys[k].defined()) {
          column_sum(overlap.of_rows(out[bias]), in_rows, overlap.of_output(dys[k]), scale);
        } else {
          pass_on(overlap.of_rows(out[bias]), in_rows);
        }
      }
    }
  }

  std::vector<at::Tensor> result;
  for (auto& sum : sums) result.push_back(sum ? sum->result().to(options.compute_dtype) : at::Tensor());
  for (const int place : gradient_place) result.push_back(place < 0 ? at::Tensor() : home[place]);
  return result;
}

}  // namespace rtp
