#include "ops/bundles/experts.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <utility>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/gemm/grouped.h"
#include "compute/scaled.h"

namespace rtp {
namespace {

constexpr OperationKind kExperts = operation_kind("experts");

// The parameters of experts, and their places.
struct ExpertsWeights : Weights {
  ExpertsWeights(Executor& executor, const RotationOptions& options, Pass pass, const ExpertsShape& shape,
                 const std::vector<at::Tensor>& parameters)
      : Weights(executor, options, kExperts, pass, parameters), up_rows((shape.gated ? 2 : 1) * shape.hidden_features) {
    const auto stacked = [&](int64_t outputs, int64_t inputs, std::optional<BlockFormat> frozen) {
      if (shape.transposed) std::swap(outputs, inputs);
      ParameterFacts facts{{shape.experts, outputs, inputs}, 0, frozen, /*group=*/1};  // as the biases
      facts.codes = shape.codes, facts.inputs_first = shape.transposed;
      return facts;
    };
    const bool joined = shape.interleaved || shape.transposed || shape.up_bias;
    RTP_ASSERT(!shape.gate_apart || (shape.gated && !joined), "a gate that is a parameter of its own");
    const int64_t own_rows = shape.gate_apart ? shape.hidden_features : up_rows;
    up = add(stacked(own_rows, shape.features, shape.up_frozen));
    up_bias = add({{shape.experts, up_rows}}, shape.up_bias);
    down = add(stacked(shape.features, shape.hidden_features, shape.down_frozen));
    down_bias = add({{shape.experts, shape.features}}, shape.down_bias);
    gate = add(stacked(shape.hidden_features, shape.features, shape.up_frozen), shape.gate_apart);
    RTP_ASSERT(parameters.size() == count(), "parameters of experts");
  }

  int64_t up_rows;  // with those of the gate
  int up, up_bias, down, down_bias, gate;
};

// The routed tokens of the experts of a step's shards: rows [first, first + rows) in expert order.
class Group {
 public:
  Group(const ExpertsResult& routed, const ExpertsWeights& cut, const Step& step, int64_t choices)
      : expert_(cut.rows(cut.up, step).first), experts_(cut.rows(cut.up, step).count), starts_(routed.starts) {
    first = starts_[expert_];
    rows = starts_[expert_ + experts_] - first;
    place = routed.order.narrow(0, first, rows);
    token = place.div(choices, "floor");
    ends_ = routed.ends.narrow(0, expert_, experts_);
  }

  // Calls body(e, slice, count) for every expert of the shards; slice(tensor) returns the rows of expert e.
  template <typename Body>
  void each(Body&& body) const {
    for (int64_t e = 0; e < experts_; ++e) {
      const int64_t begin = starts_[expert_ + e] - first;
      const int64_t count = starts_[expert_ + e + 1] - starts_[expert_ + e];
      body(e, [begin, count](const at::Tensor& rows) { return rows.narrow(0, begin, count); }, count);
    }
  }

  // Grouped GEMM: rows of `left` of each expert times that expert's matrix of `stack` (transposed), plus its row of
  // `biases` if defined. Uses one launch if torch's kernel applies; that kernel does not support biases.
  at::Tensor product(const at::Tensor& left, const at::Tensor& stack, bool transpose, const at::Tensor& biases = {},
                     at::Tensor out = {}) const {
    const at::Tensor matrices = transpose ? stack.transpose(1, 2) : stack;
    if (!biases.defined() && !grouped_refusal(left, matrices)) {
      at::Tensor made = grouped_product(left, matrices, ends_.sub(first).to(at::kInt));
      return out.defined() ? out.copy_(made) : made;
    }
    if (!out.defined()) out = at::empty({rows, transpose ? stack.size(1) : stack.size(2)}, left.options());
    each([&](int64_t e, const auto& of, int64_t count) {
      if (count == 0) return;
      gemm(of(out), biases.defined() ? biases.select(0, e) : biases, of(left), matrices.select(0, e));
    });
    return out;
  }

  // The same with operands of 8 bits; the rows of each expert are quantized by themselves. Writes `out`.
  at::Tensor product(const at::Tensor& left, const CodePlane& plane, const std::vector<Codes>& matrices, bool fast,
                     const at::Tensor& biases, const at::Tensor& out) const {
    each([&](int64_t e, const auto& of, int64_t count) {
      if (count == 0) return;
      const Codes codes = quantized(plane, of(left));
      of(out).copy_(scaled_product(codes, matrices[static_cast<size_t>(e)], out.scalar_type(), fast));
      if (biases.defined()) of(out).add_(biases.select(0, e));
    });
    return out;
  }

  int64_t first = 0, rows = 0;
  at::Tensor place;  // [rows] positions in index.view(-1)
  at::Tensor token;  // [rows]

 private:
  int64_t expert_, experts_;
  const std::vector<int64_t>& starts_;
  at::Tensor ends_;  // ends of its experts
};

// Returns the gate half and the other half of up(x).
std::pair<at::Tensor, at::Tensor> gate_and_up(const at::Tensor& values, const ExpertsShape& shape) {
  const int64_t hidden = shape.hidden_features;
  if (!shape.gated) return {at::Tensor(), values};
  if (shape.interleaved) return {values.slice(1, 0, 2 * hidden, 2), values.slice(1, 1, 2 * hidden, 2)};
  return {values.narrow(1, 0, hidden), values.narrow(1, hidden, hidden)};
}

// The products of the rows of a group with the matrices of their experts.
class Products {
 public:
  Products(const Group& group, const ExpertsWeights& cut, const ExpertsShape& shape, std::vector<at::Tensor> shard)
      : group_(group), cut_(cut), shape_(shape), shard_(std::move(shard)) {}

  // Returns rows W^T, plus their biases, of a layer: [rows, outputs], in `out` if it is defined.
  at::Tensor outputs(const at::Tensor& left, int weight, int bias, at::Tensor out = {}) const {
    if (!shape_.scaled) return group_.product(left, shard_[weight], !shape_.transposed, biases(bias), out);
    std::vector<Codes> matrices = cut_.stacked_codes(shard_, weight);
    if (!out.defined()) out = at::empty({left.size(0), matrices[0].codes.size(0)}, left.options());
    for (Codes& matrix : matrices) matrix = matrix.t();
    return group_.product(left, shape_.scaled->tokens, matrices, /*fast=*/true, biases(bias), out);
  }

  // Returns rows W: [rows, inputs], from products in 8 bits in float32.
  at::Tensor inputs(const at::Tensor& left, int weight) const {
    if (!shape_.scaled) return group_.product(left, shard_[weight], shape_.transposed);
    const std::vector<Codes> matrices = cut_.stacked_codes(shard_, weight);
    const at::Tensor out = at::empty({left.size(0), matrices[0].codes.size(1)}, left.options().dtype(at::kFloat));
    return group_.product(left, shape_.scaled->gradients, matrices, /*fast=*/false, {}, out);
  }

  // Returns gate and up of the rows: [rows, up_rows], in `out` if it is defined.
  at::Tensor up(const at::Tensor& left, at::Tensor out = {}) const {
    if (!shape_.gate_apart) return outputs(left, cut_.up, cut_.up_bias, std::move(out));
    if (!out.defined()) out = at::empty({left.size(0), cut_.up_rows}, left.options());
    const auto [gate, pre] = gate_and_up(out, shape_);
    outputs(left, cut_.gate, -1, gate);
    outputs(left, cut_.up, -1, pre);
    return out;
  }

  // Returns the gradients of the rows for those of `up`, in the dtype of sums.
  at::Tensor inputs_of_up(const at::Tensor& left, at::ScalarType sums) const {
    if (!shape_.gate_apart) return inputs(left, cut_.up).to(sums);
    const auto [gate, pre] = gate_and_up(left, shape_);
    return inputs(gate, cut_.gate).to(sums).add_(inputs(pre, cut_.up));
  }

  at::Tensor biases(int bias) const { return bias < 0 ? at::Tensor() : shard_[bias]; }

 private:
  const Group& group_;
  const ExpertsWeights& cut_;
  const ExpertsShape& shape_;
  std::vector<at::Tensor> shard_;
};

// Adds the gradient of an expert's matrix, as it is stored, to `in`: that of rows of its outputs and of its inputs.
void add_gradient(const ExpertsShape& shape, const at::Tensor& out, const at::Tensor& in, const at::Tensor& outputs,
                  const at::Tensor& inputs, double scale) {
  if (!shape.scaled || !shape.scaled->weight_gradients) {
    return shape.transposed ? gemm(out, in, inputs.t(), outputs, scale) : gemm(out, in, outputs.t(), inputs, scale);
  }
  const auto& [of_outputs, of_inputs] = *shape.scaled->weight_gradients;
  const Codes dy = quantized(of_outputs, padded(outputs, shape.scaled->rows));
  const Codes x = quantized(of_inputs, padded(inputs, shape.scaled->rows));
  shape.transposed ? scaled_gemm(out, in, x.t(), dy, scale) : scaled_gemm(out, in, dy.t(), x, scale);
}

// Returns the hidden values of a clamped gate, and writes their gradients if d_value is defined. Computed in the
// accumulation dtype and rounded once.
at::Tensor clamped_values(const ClampedGate& clamped, const at::Tensor& pre, const at::Tensor& gate,
                          const at::Tensor& d_value = {}, const at::Tensor& d_pre = {}, const at::Tensor& d_gate = {}) {
  const at::ScalarType dtype = pre.scalar_type(), sums = accumulation_dtype(dtype);
  const at::Tensor up = pre.to(sums), through = gate.to(sums);
  const at::Tensor factor = up.clamp(-clamped.limit, clamped.limit).add_(1.0);
  const at::Tensor bounded = through.clamp_max(clamped.limit);
  const at::Tensor sigmoid = bounded.mul(clamped.alpha).sigmoid_();
  const at::Tensor glu = bounded.mul(sigmoid);
  const at::Tensor value = factor.mul(glu).to(dtype);
  if (!d_value.defined()) return value;
  const at::Tensor d = d_value.to(sums);
  d_pre.copy_(d.mul(glu).masked_fill_(up.abs().gt(clamped.limit), 0.0));
  const at::Tensor slope = sigmoid.neg().add_(1.0).mul_(bounded).mul_(clamped.alpha).add_(1.0).mul_(sigmoid);
  d_gate.copy_(d.mul(factor).mul_(slope).masked_fill_(through.gt(clamped.limit), 0.0));
  return value;
}

at::Tensor values_of(const ExpertsShape& shape, const at::Tensor& pre, const at::Tensor& gate) {
  return shape.clamped ? clamped_values(*shape.clamped, pre, gate) : hidden_forward(shape.activation, pre, gate);
}

// Returns the hidden values, and writes the gradients of what they were computed from.
at::Tensor gradients_of(const ExpertsShape& shape, const at::Tensor& d_value, const at::Tensor& pre,
                        const at::Tensor& gate, const at::Tensor& d_pre, const at::Tensor& d_gate) {
  if (shape.clamped) return clamped_values(*shape.clamped, pre, gate, d_value, d_pre, d_gate);
  hidden_backward(shape.activation, d_value, pre, gate, d_pre, d_gate);
  return d_value;
}

// Returns the product of the gradients of outputs without the router's weights, and with them. In 8 bits the gradients
// become codes with the weights, as those of a plain layer, and the product is divided by them; small ones, which may
// be zero, count as more then.
template <typename Product>
std::pair<at::Tensor, at::Tensor> gradients_of_hidden(const ExpertsShape& shape, const at::Tensor& d_rows,
                                                      const at::Tensor& factor, Product&& product) {
  constexpr double kSmall = 0x1p-10;
  if (!shape.scaled) {
    const at::Tensor d_plain = product(d_rows);
    return {d_plain, d_plain.mul(factor)};
  }
  const at::Tensor used = factor.masked_fill(factor.abs().lt(kSmall), kSmall);
  const at::Tensor found = product(d_rows.mul(used).to(d_rows.scalar_type()));
  return {found.div(used), found.mul(factor.div(used))};
}

void check_operands(const Executor& executor, const ExpertsShape& shape, const RotationOptions& options,
                    const at::Tensor& x, const at::Tensor& weights, const at::Tensor& index) {
  RTP_CHECK_VALUE(x.dim() == 2 && x.size(1) == shape.features, options.name, ": expected an input of shape [T, ",
                  shape.features, "], got ", x.sizes());
  RTP_CHECK_TYPE(x.scalar_type() == options.compute_dtype, options.name, ": expected an input of dtype ",
                 options.compute_dtype, ", got ", x.scalar_type());
  RTP_CHECK_VALUE(index.dim() == 2 && index.size(0) == x.size(0) && index.sizes() == weights.sizes(), options.name,
                  ": expected index and weights of shape [", x.size(0), ", K], got ", index.sizes(), " and ",
                  weights.sizes());
  RTP_CHECK_TYPE(index.scalar_type() == at::kLong && index.is_contiguous(), options.name,
                 ": expected a contiguous int64 index, got ", index.scalar_type());
  for (const at::Tensor& tensor : {x, weights, index}) {
    RTP_CHECK_TYPE(tensor.device() == executor.device(), options.name, ": expected operands on ",
                   executor.device().str(), ", the device of the ring, got ", tensor.device().str());
  }
}

// Sorts the choices by expert. One host read returns the sizes of all GEMMs and validates the index, unless the sizes
// are known.
void route(const at::Tensor& index, const ExpertsShape& shape, const RotationOptions& options, ExpertsResult& result) {
  const auto [sorted, order] = index.view(-1).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  result.order = order;
  const at::Tensor found =
      at::searchsorted(sorted, at::arange(shape.experts + 2, sorted.options()), /*out_int32=*/false, /*right=*/false);
  result.ends = found.narrow(0, 1, shape.experts);
  if (!shape.starts.empty()) {
    TORCH_CHECK_INDEX(static_cast<int64_t>(shape.starts.size()) == shape.experts + 1 && shape.starts.front() == 0 &&
                          shape.starts.back() == sorted.numel(),
                      options.name, ": expected starts of ", shape.experts, " experts among ", sorted.numel(),
                      " choices, got ", shape.starts);
    const at::Tensor expected = at::tensor(shape.starts, at::kLong).to(found.device(), /*non_blocking=*/true);
    at::_assert_async(found.narrow(0, 0, shape.experts + 1).eq(expected).all());
    result.starts = shape.starts;
    return;
  }
  const at::Tensor starts = found.cpu();
  const int64_t* first = starts.const_data_ptr<int64_t>();
  TORCH_CHECK_INDEX(first[0] == 0 && first[shape.experts + 1] == sorted.numel(), options.name,
                    ": expected an index in [0, ", shape.experts, "], got one outside");
  result.starts.assign(first, first + shape.experts + 1);
}

}  // namespace

ExpertsResult experts_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weights,
                              const at::Tensor& index, const std::vector<at::Tensor>& parameters,
                              const ExpertsShape& shape, bool keep, const RotationOptions& options) {
  check_operands(executor, shape, options, x, weights, index);
  const ExpertsWeights cut(executor, options, Pass::forward, shape, parameters);
  ShardBundle bundle = *cut.bundle();
  ExpertsResult result;
  route(index, shape, options, result);
  const at::ScalarType sums = accumulation_dtype(options.compute_dtype);
  const at::Tensor y = at::zeros(x.sizes(), x.options().dtype(sums));
  const at::Tensor factors = weights.reshape(-1).to(sums);
  if (keep) result.kept = at::empty({result.starts.back(), cut.up_rows}, x.options());

  const Schedule& schedule = forward_schedule(executor, options, bundle, {.groups = cut.grouped()});
  Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
  std::vector<bool> chosen;  // owners of experts that have tokens
  for (int owner = 0; owner < executor.ranks(); ++owner) {
    const Rows experts = cut.rows(cut.up, owner);
    chosen.push_back(result.starts[experts.first + experts.count] > result.starts[experts.first]);
  }
  pass.expect(std::move(chosen));
  while (const Step* step = pass.next()) {
    const Group group(result, cut, *step, index.size(1));
    if (group.rows == 0) continue;
    const Products products(group, cut, shape, pass.weight());
    const at::Tensor room = keep ? result.kept.narrow(0, group.first, group.rows) : at::Tensor();
    const at::Tensor values = products.up(x.index_select(0, group.token), room);
    const auto [gate, pre] = gate_and_up(values, shape);
    const at::Tensor out = products.outputs(values_of(shape, pre, gate), cut.down, cut.down_bias).to(sums);
    y.index_add_(0, group.token, out.mul(factors.index_select(0, group.place).unsqueeze(1)));
  }
  result.y = y.to(options.compute_dtype);
  return result;
}

std::vector<at::Tensor> experts_backward(Executor& executor, const at::Tensor& dy, const at::Tensor& x,
                                         const at::Tensor& weights, const ExpertsResult& routed,
                                         const std::vector<at::Tensor>& parameters, const ExpertsShape& shape,
                                         const std::vector<bool>& needs, const RotationOptions& options) {
  const bool needs_x = needs[0], needs_weights = needs[1];
  RTP_ASSERT(routed.kept.defined() || !shape.scaled, "a backward in 8 bits recomputes nothing: it has other codes");
  const ExpertsWeights cut(executor, options, Pass::backward, shape, parameters);
  const at::ScalarType sums = accumulation_dtype(options.compute_dtype);
  const auto sum_options = x.options().dtype(sums);
  std::optional<ShardBundle> bundle = cut.bundle();
  const Gradients gradients(executor, options, cut, {needs.begin() + 2, needs.end()});

  const int64_t choices = weights.size(1);
  const at::Tensor factors = weights.reshape(-1).to(sums);
  const at::Tensor dx = needs_x ? at::zeros({x.size(0), shape.features}, sum_options) : at::Tensor();
  const at::Tensor d_factors = needs_weights ? at::zeros({weights.numel()}, sum_options) : at::Tensor();

  struct Slice {  // values of the tokens of a step's experts, from its dgrad to its wgrad
    at::Tensor x, hidden, d_out, d_values;
  };
  std::map<int, Slice> slices;
  const BackwardNeeds wanted{.wgrad = gradients.any(), .bundle = kExperts.bundle, .permits = {.groups = cut.grouped()}};
  const Schedule& schedule = backward_schedule(executor, options, bundle, wanted);
  Execution pass(executor, schedule, std::move(bundle), gradients.bundle(cut), options.name + " backward");
  while (const Step* step = pass.next()) {
    const Group group(routed, cut, *step, choices);
    if (step->compute == Compute::dgrad) {
      if (group.rows == 0) continue;
      const Products products(group, cut, shape, pass.weight());
      const at::Tensor rows = x.index_select(0, group.token);
      const at::Tensor values =
          routed.kept.defined() ? routed.kept.narrow(0, group.first, group.rows) : products.up(rows);
      const auto [gate, pre] = gate_and_up(values, shape);
      const at::Tensor factor = factors.index_select(0, group.place).unsqueeze(1);
      const at::Tensor d_rows = dy.index_select(0, group.token);
      // d_plain excludes the router weight, so that the gradient of the weight is a product with the hidden values
      const auto [d_plain, d_hidden] = gradients_of_hidden(
          shape, d_rows, factor, [&](const at::Tensor& rows) { return products.inputs(rows, cut.down); });
      const at::Tensor d_values = at::empty({group.rows, cut.up_rows}, x.options());
      const auto [d_gate, d_pre] = gate_and_up(d_values, shape);
      const at::Tensor hidden = gradients_of(shape, d_hidden.to(options.compute_dtype), pre, gate, d_pre, d_gate);
      if (needs_weights) {
        const at::Tensor along = d_plain.to(sums).mul(hidden).sum(1);
        if (shape.down_bias) {
          const at::Tensor biases = products.biases(cut.down_bias);
          group.each([&](int64_t e, const auto& of, int64_t count) {
            if (count > 0) of(along).add_(of(d_rows).to(sums).mul(biases.select(0, e)).sum(1));
          });
        }
        d_factors.index_copy_(0, group.place, along);
      }
      if (needs_x) dx.index_add_(0, group.token, products.inputs_of_up(d_values, sums));
      if (gradients.any()) {
        slices[step->owner] = {rows, hidden, d_rows.mul(factor).to(options.compute_dtype), d_values};
      }
      continue;
    }
    const Gradients::Sums of_shard(gradients, pass);
    // calls make(gradient of the expert, received partial sum, slice), or copies the partial sum for an expert without
    // tokens
    const auto add = [&](int parameter, const auto& make) {
      if (!of_shard.wants(parameter)) return;
      const at::Tensor arrived = of_shard.arrived(parameter), out = of_shard.out(parameter);
      group.each([&](int64_t e, const auto& of, int64_t count) {
        const at::Tensor before = arrived.defined() ? arrived.select(0, e) : arrived;
        const at::Tensor after = out.select(0, e);
        if (count == 0) {
          copy_or_zero(after, before);
        } else {
          make(after, before, of);
        }
      });
    };
    const auto add_weight = [&](int parameter, const at::Tensor& outputs, const at::Tensor& inputs) {
      add(parameter, [&](const at::Tensor& after, const at::Tensor& before, const auto& of) {
        add_gradient(shape, after, before, of(outputs), of(inputs), of_shard.scale());
      });
    };
    const auto add_bias = [&](int parameter, const at::Tensor& outputs) {
      add(parameter, [&](const at::Tensor& after, const at::Tensor& before, const auto& of) {
        column_sum(after, before, of(outputs), of_shard.scale());
      });
    };
    const Slice slice = group.rows > 0 ? slices.at(step->owner) : Slice{};
    const bool apart = cut.gate >= 0 && group.rows > 0;
    const auto [d_gate, d_up] = apart ? gate_and_up(slice.d_values, shape) : std::pair(at::Tensor(), slice.d_values);
    add_weight(cut.gate, d_gate, slice.x);
    add_weight(cut.up, d_up, slice.x);
    add_bias(cut.up_bias, slice.d_values);
    add_weight(cut.down, slice.d_out, slice.hidden);
    add_bias(cut.down_bias, slice.d_out);
    slices.erase(step->owner);
  }

  std::vector<at::Tensor> result{
      needs_x ? dx.to(options.compute_dtype) : at::Tensor(),
      needs_weights ? d_factors.view(weights.sizes()).to(weights.scalar_type()) : at::Tensor()};
  for (at::Tensor& gradient : gradients.result()) result.push_back(std::move(gradient));
  return result;
}

}  // namespace rtp
