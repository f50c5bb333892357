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

// Returns act(pre), or act(gate) * pre if there is a gate. All are [M, hidden features].
at::Tensor hidden_forward(Activation activation, const at::Tensor& pre, const at::Tensor& gate);
// Overwrites d_value, the gradient of these values, with the values, and writes the gradients of pre and gate into
// d_pre and d_gate; without a gate, both gates are undefined.
void hidden_backward(Activation activation, const at::Tensor& d_value, const at::Tensor& pre, const at::Tensor& gate,
                     const at::Tensor& d_pre, const at::Tensor& d_gate);

}  // namespace rtp
