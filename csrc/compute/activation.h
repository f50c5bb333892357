// Activation functions of MLPs and experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/activation.h"

namespace rtp {

// Throws std::invalid_argument for an unknown name.
Activation parse_activation(const std::string& name);

// out = activation(x). `out` may be x.
void activate(Activation activation, const at::Tensor& out, const at::Tensor& x);
// out = gradient of x, given dy, the gradient of activation(x). `out` may be dy.
void activate_backward(Activation activation, const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x);

// value = act(pre), or act(gate) * pre if there is a gate, and the gradients of both. All are [M, hidden features].
struct Hidden {
  at::Tensor value;
  at::Tensor d_pre;
  at::Tensor d_gate;  // undefined without a gate
};
at::Tensor hidden_forward(Activation activation, const at::Tensor& pre, const at::Tensor& gate);
// Overwrites d_value with one of the results.
Hidden hidden_backward(Activation activation, const at::Tensor& d_value, const at::Tensor& pre, const at::Tensor& gate);

}  // namespace rtp
