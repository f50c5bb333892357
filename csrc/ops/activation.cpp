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

at::Tensor activate_backward(Activation activation, const at::Tensor& dy, const at::Tensor& x) {
  switch (activation) {
    case Activation::relu:
      return at::threshold_backward(dy, x, 0);
    case Activation::gelu:
      return at::gelu_backward(dy, x, "none");
    case Activation::gelu_tanh:
      return at::gelu_backward(dy, x, "tanh");
    case Activation::silu:
      return at::silu_backward(dy, x);
  }
  RTP_ASSERT(false, "unknown activation");
}

at::Tensor hidden_forward(Activation activation, const at::Tensor& pre, const at::Tensor& gate) {
  return gate.defined() ? activate(activation, gate).mul_(pre) : activate(activation, pre);
}

Hidden hidden_backward(Activation activation, const at::Tensor& d_value, const at::Tensor& pre,
                       const at::Tensor& gate) {
  if (!gate.defined()) {
    return {activate(activation, pre), activate_backward(activation, d_value, pre), at::Tensor()};
  }
  const at::Tensor active = activate(activation, gate);
  const at::Tensor d_pre = d_value.mul(active);
  const at::Tensor d_gate = activate_backward(activation, d_value.mul(pre), gate);
  return {active.mul(pre), d_pre, d_gate};
}

}  // namespace rtp
