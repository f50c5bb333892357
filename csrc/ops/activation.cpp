#include "ops/activation.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include "checks.h"

namespace rtp {

Activation parse_activation(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  RTP_CHECK_VALUE(name == "silu", "expected an activation of relu, gelu, gelu_tanh or silu, got ", name);
  return Activation::silu;
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::relu:
      return at::relu(x);
    case Activation::gelu:
      return at::gelu(x, "none");
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::silu:
      return at::silu(x);
  }
  RTP_ASSERT(false, "unknown activation");
}

void activate_backward(Activation activation, const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor result = out;  // ATen's out arguments are non-const handles
  switch (activation) {
    case Activation::relu:
      at::threshold_backward_out(result, dy, x, 0);
      return;
    case Activation::gelu:
      at::gelu_backward_out(result, dy, x, "none");
      return;
    case Activation::gelu_tanh:
      at::gelu_backward_out(result, dy, x, "tanh");
      return;
    case Activation::silu:
      at::silu_backward_out(result, dy, x);
      return;
  }
  RTP_ASSERT(false, "unknown activation");
}

at::Tensor hidden_forward(Activation activation, const at::Tensor& pre, const at::Tensor& gate) {
  return gate.defined() ? activate(activation, gate).mul_(pre) : activate(activation, pre);
}

Hidden hidden_backward(Activation activation, const at::Tensor& d_value, const at::Tensor& pre,
                       const at::Tensor& gate) {
  if (!gate.defined()) {
    const at::Tensor value = activate(activation, pre);
    activate_backward(activation, d_value, d_value, pre);
    return {value, d_value, at::Tensor()};
  }
  const at::Tensor active = activate(activation, gate);
  const at::Tensor d_pre = d_value.mul(active);
  d_value.mul_(pre);
  activate_backward(activation, d_value, d_value, gate);
  return {active.mul_(pre), d_pre, d_value};
}

}  // namespace rtp
