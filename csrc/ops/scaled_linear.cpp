#include "ops/scaled_linear.h"

#include <ATen/ops/constant_pad_nd.h>

#include <utility>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/joined.h"
#include "compute/scaled.h"

namespace rtp {
namespace {

struct ScaledWeights : Weights {
  ScaledWeights(Executor& executor, const RotationOptions& options, Pass pass, const LinearBundle& bundle,
                const std::vector<at::Tensor>& parameters, bool needed = true)
      : Weights(executor, options, kLinear, pass, parameters) {
    for (size_t layer = 0; layer < bundle.shapes.size(); ++layer) {
      const LinearShape& shape = bundle.shapes[layer];
      RTP_CHECK_VALUE(shape.codes && shape.by_outputs && !shape.transposed && !shape.frozen, options.name,
                      ": expected weights [out, in] cut by outputs for products in 8 bits");
      weight.push_back(add(weight_facts(shape), true, needed));
      bias.push_back(add({{shape.out_features}}, bundle.biased[layer], needed));
    }
  }

  std::vector<int> weight, bias;  // by layer
};

class ScaledBackward {
 public:
  ScaledBackward(Executor& executor, const std::vector<at::Tensor>& dys, const at::Tensor& x,
                 const std::vector<at::Tensor>& parameters, const LinearBundle& bundle, const ScaledOperands& operands,
                 bool needs_x, const std::vector<bool>& needs_parameter, const RotationOptions& options)
      : executor_(executor),
        dys_(dys),
        x_(x),
        operands_(operands),
        options_(options),
        weights_(executor, options, Pass::backward, bundle, parameters, needs_x),
        gradients_(executor, options, weights_, needs_parameter),
        of_dx_(dys.size()),
        of_dw_(dys.size()),
        joins_(bundle.shapes[0].codes->backward.stacks(/*summed=*/true)) {
    if (needs_x) dx_.emplace(x.size(0), x.size(1), x.options());
    bool trained = false;
    for (size_t layer = 0; layer < dys.size(); ++layer) {
      if (!dys[layer].defined()) continue;
      check_operand(executor, options, "an output gradient", dys[layer], bundle.shapes[layer].out_features);
      if (needs_x && !operands.gradients.swizzled()) of_dx_[layer] = quantized(operands.gradients, dys[layer]);
      if (!operands.weight_gradients || !gradients_.wants(weights_.weight[layer])) continue;
      trained = true;
      if (!swizzles()) of_dw_[layer] = quantized((*operands.weight_gradients)[0], padded(dys[layer], operands.rows));
    }
    if (trained) tokens_ = quantized((*operands.weight_gradients)[1], padded(x, operands.rows));
  }

  std::vector<at::Tensor> run() {
    std::optional<ShardBundle> weights = weights_.bundle(), gradients = gradients_.bundle(weights_);
    const BackwardNeeds needs{
        .dgrad = weights.has_value(), .wgrad = gradients.has_value(), .permits = {.groups = weights_.groups()}};
    const Schedule& schedule = backward_schedule(executor_, weights_.options(), weights, needs);
    Execution pass(executor_, schedule, std::move(weights), std::move(gradients), options_.name + " backward");
    while (const Step* step = pass.next()) {
      step->compute == Compute::wgrad ? wgrad(*step, pass) : dgrad(*step, pass);
    }
    std::vector<at::Tensor> result{dx_ ? executor_.results().of(dx_->result(), options_.compute_dtype) : at::Tensor()};
    for (at::Tensor& gradient : gradients_.result()) result.push_back(std::move(gradient));
    return result;
  }

 private:
  // Whether scales of slices of dy are made with the slices, since those of the whole cannot be cut.
  bool swizzles() const { return (*operands_.weight_gradients)[0].swizzled(); }

  void dgrad(const Step& step, Execution& pass) {
    const std::vector<at::Tensor> shards = pass.weight();
    std::vector<Codes> dys, weights;
    for (size_t layer = 0; layer < dys_.size(); ++layer) {
      const Rows rows = weights_.rows(weights_.weight[layer], step);
      if (rows.count == 0 || !dys_[layer].defined()) continue;
      const std::optional<Codes>& whole = of_dx_[layer];
      dys.push_back(whole ? whole->columns(rows.first, rows.count)
                          : quantized(operands_.gradients, dys_[layer].narrow(1, rows.first, rows.count)));
      weights.push_back(weights_.codes(shards, weights_.weight[layer], step));
    }
    if (joins_ && !dys.empty()) dys = {joined_columns(dys)}, weights = {joined(weights, /*summed=*/true)};
    for (size_t part = 0; part < dys.size(); ++part) {
      dx_->add([&](const at::Tensor& out, const at::Tensor& in) { scaled_gemm(out, in, dys[part], weights[part]); });
    }
  }

  void wgrad(const Step& step, const Execution& pass) {
    const Gradients::Sums sums(gradients_, pass);
    std::vector<at::Tensor> outs, ins;
    std::vector<Codes> dys;
    for (size_t layer = 0; layer < dys_.size(); ++layer) {
      const int weight = weights_.weight[layer], bias = weights_.bias[layer];
      const Rows rows = weights_.rows(weight, step);
      const at::Tensor& whole = dys_[layer];
      if (rows.count == 0) continue;
      if (!whole.defined()) {
        for (const int each : {weight, bias}) {
          if (sums.wants(each)) copy_or_zero(sums.out(each), sums.arrived(each));
        }
        continue;
      }
      const at::Tensor dy = whole.narrow(1, rows.first, rows.count);
      if (sums.wants(weight) && !operands_.weight_gradients) {
        gemm(sums.out(weight), sums.arrived(weight), dy.t(), x_, sums.scale());
      } else if (sums.wants(weight)) {
        const CodePlane& plane = (*operands_.weight_gradients)[0];
        outs.push_back(sums.out(weight)), ins.push_back(sums.arrived(weight));
        dys.push_back((of_dw_[layer] ? of_dw_[layer]->columns(rows.first, rows.count)
                                     : quantized(plane, padded(dy, operands_.rows)))
                          .t());
      }
      if (sums.wants(bias)) column_sum(sums.out(bias), sums.arrived(bias), dy, sums.scale());
    }
    // codes of no tokens have no scales to join
    if (dys.size() > 1 && x_.size(0) > 0 && (*operands_.weight_gradients)[0].joins()) {
      const Codes left = joined(dys);
      add_joined(outs, ins, [&](const at::Tensor& out, const at::Tensor& in) {
        scaled_gemm(out, in, left, *tokens_, sums.scale());
      });
    } else {
      for (size_t part = 0; part < dys.size(); ++part) {
        scaled_gemm(outs[part], ins[part], dys[part], *tokens_, sums.scale());
      }
    }
  }

  Executor& executor_;
  const std::vector<at::Tensor>& dys_;
  const at::Tensor& x_;
  const ScaledOperands& operands_;
  const RotationOptions& options_;
  ScaledWeights weights_;
  Gradients gradients_;
  std::vector<std::optional<Codes>> of_dx_, of_dw_;  // of dy, by layer
  std::optional<Codes> tokens_;                      // of x, for dW
  bool joins_;                                       // the shards of all layers are one operand of dx
  std::optional<ProductSum> dx_;
};

}  // namespace

at::Tensor padded(const at::Tensor& values, int64_t multiple) {
  const int64_t rows = values.size(0), more = values.is_cuda() ? (multiple - rows % multiple) % multiple : 0;
  return more == 0 ? values : at::constant_pad_nd(values, {0, 0, 0, more});
}

std::vector<at::Tensor> scaled_linear_forward(Executor& executor, const at::Tensor& x,
                                              const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                              const ScaledOperands& operands, const RotationOptions& options) {
  const ScaledWeights layers(executor, options, Pass::forward, bundle, parameters);
  std::vector<at::Tensor> outputs;
  for (const LinearShape& shape : bundle.shapes) {
    check_operand(executor, options, "an input", x, shape.in_features);
    outputs.push_back(executor.results().empty({x.size(0), shape.out_features}, x.options()));
  }
  const Codes tokens = quantized(operands.tokens, x);
  const bool joins = outputs.size() > 1 && bundle.shapes[0].codes->forward.stacks(/*summed=*/false);
  const auto multiply = [&](const Codes& weight) {
    return scaled_product(tokens, weight.t(), options.compute_dtype, true);
  };
  ShardBundle weights = *layers.bundle();
  const Schedule& schedule = forward_schedule(executor, layers.options(), weights, {.groups = layers.groups()});
  Execution pass(executor, schedule, std::move(weights), std::nullopt, options.name + " forward");
  while (const Step* step = pass.next()) {
    const std::vector<at::Tensor> shards = pass.weight();
    std::vector<Codes> shards_in_codes;
    std::vector<at::Tensor> ys;
    for (size_t layer = 0; layer < outputs.size(); ++layer) {
      const Rows rows = layers.rows(layers.weight[layer], *step);
      if (rows.count == 0) continue;
      shards_in_codes.push_back(layers.codes(shards, layers.weight[layer], *step));
      ys.push_back(outputs[layer].narrow(1, rows.first, rows.count));
    }
    if (joins && !shards_in_codes.empty()) {
      const at::Tensor product = multiply(joined(shards_in_codes));
      int64_t column = 0;
      for (at::Tensor& y : ys) {
        y.copy_(product.narrow(1, column, y.size(1)));
        column += y.size(1);
      }
    } else {
      for (size_t part = 0; part < ys.size(); ++part) ys[part].copy_(multiply(shards_in_codes[part]));
    }
    for (size_t layer = 0; layer < outputs.size(); ++layer) {
      const int bias = layers.bias[layer];
      const Rows rows = layers.rows(layers.weight[layer], *step);
      if (bias < 0 || rows.count == 0) continue;
      outputs[layer].narrow(1, rows.first, rows.count).add_(shards[static_cast<size_t>(layers.index(bias))]);
    }
  }
  return outputs;
}

std::vector<at::Tensor> scaled_linear_backward(Executor& executor, const std::vector<at::Tensor>& dys,
                                               const at::Tensor& x, const std::vector<at::Tensor>& parameters,
                                               const LinearBundle& bundle, const ScaledOperands& operands, bool needs_x,
                                               const std::vector<bool>& needs_parameter,
                                               const RotationOptions& options) {
  return ScaledBackward(executor, dys, x, parameters, bundle, operands, needs_x, needs_parameter, options).run();
}

}  // namespace rtp
