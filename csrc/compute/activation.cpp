#include "compute/activation.h"

#include <ATen/ops/clamp_min.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>

#include "base/checks.h"
#include "compute/kernel_tensors.h"

namespace rtp {

Activation parse_activation(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  RTP_CHECK_VALUE(name == "silu", "expected an activation of relu, gelu, gelu_tanh or silu, got ", name);
  return Activation::silu;
}

namespace {

// On a CPU, gelu_out of torch 2.11 to 2.14 writes contiguous rows into a result that has others.
void gelu_into(at::Tensor& result, const at::Tensor& x, const char* approximate) {
  if (result.is_contiguous()) {
    at::gelu_out(result, x, approximate);
  } else {
    result.copy_(at::gelu(x, approximate));
  }
}

}  // namespace

void activate(Activation activation, const at::Tensor& out, const at::Tensor& x) {
  at::Tensor result = out;  // ATen's out arguments are non-const handles
  switch (activation) {
    case Activation::relu:
      at::clamp_min_out(result, x, 0);
      return;
    case Activation::gelu:
      gelu_into(result, x, "none");
      return;
    case Activation::gelu_tanh:
      gelu_into(result, x, "tanh");
      return;
    case Activation::silu:
      at::silu_out(result, x);
      return;
  }
  RTP_ASSERT(false, "unknown activation");
}

void activate_backward(Activation activation, const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor result = out;
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

namespace {

// Calls body with views of a few rows of every tensor. On a CPU, consecutive elementwise operations then find their
// operands in the cache; on other devices, one call covers all rows.
template <typename Body, typename... Tensors>
void by_rows(Body&& body, const at::Tensor& first, const Tensors&... others) {
  constexpr int64_t kBytes = 128 << 10;
  const int64_t rows = first.size(0);
  const int64_t row_bytes = std::max<int64_t>(first.size(1) * static_cast<int64_t>(first.element_size()), 1);
  const int64_t block = first.is_cpu() ? std::max<int64_t>(kBytes / row_bytes, 1) : std::max<int64_t>(rows, 1);
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    const auto of = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
    };
    body(of(first), of(others)...);
  }
}

// Returns whether one fused kernel supports these tensors.
template <typename... Tensors>
bool is_fused(const at::Tensor& pre, const Tensors&... others) {
  const auto same_dtype = [&](const at::Tensor& other) {
    return !other.defined() || other.scalar_type() == pre.scalar_type();
  };
  return kernels_take(pre, others...) && (same_dtype(others) && ...);
}

}  // namespace

at::Tensor hidden_forward(Activation activation, const at::Tensor& pre, const at::Tensor& gate) {
  const at::Tensor value = at::empty(pre.sizes(), pre.options());
  if (is_fused(pre, gate)) {
    const HiddenForward hidden{*element_of(pre.scalar_type()),
                               activation,
                               pre.size(0),
                               pre.size(1),
                               pre.const_data_ptr(),
                               gate.defined() ? gate.const_data_ptr() : nullptr,
                               value.data_ptr(),
                               pre.stride(0),
                               gate.defined() ? gate.stride(0) : 0,
                               value.stride(0),
                               /*windows=*/0};
    launch_on_device_of(pre, [&](void* stream) { return launch_hidden_forward(hidden, stream); });
    return value;
  }
  by_rows(
      [&](const at::Tensor& out, const at::Tensor& up, const at::Tensor& through) {
        activate(activation, out, through.defined() ? through : up);
        if (through.defined()) out.mul_(up);
      },
      value, pre, gate);
  return value;
}

void hidden_backward(Activation activation, const at::Tensor& d_value, const at::Tensor& pre, const at::Tensor& gate,
                     const at::Tensor& d_pre, const at::Tensor& d_gate) {
  if (is_fused(pre, d_value, gate, d_pre, d_gate)) {
    const HiddenBackward hidden{*element_of(pre.scalar_type()),
                                activation,
                                pre.size(0),
                                pre.size(1),
                                d_value.const_data_ptr(),
                                pre.const_data_ptr(),
                                gate.defined() ? gate.const_data_ptr() : nullptr,
                                d_value.data_ptr(),
                                d_pre.data_ptr(),
                                gate.defined() ? d_gate.data_ptr() : nullptr,
                                d_value.stride(0),
                                pre.stride(0),
                                gate.defined() ? gate.stride(0) : 0,
                                d_value.stride(0),
                                d_pre.stride(0),
                                gate.defined() ? d_gate.stride(0) : 0,
                                /*windows=*/0};
    launch_on_device_of(pre, [&](void* stream) { return launch_hidden_backward(hidden, stream); });
    return;
  }
  by_rows(
      [&](const at::Tensor& d, const at::Tensor& d_up, const at::Tensor& d_through, const at::Tensor& up,
          const at::Tensor& through) {
        if (!through.defined()) {
          activate_backward(activation, d_up, d, up);
          activate(activation, d, up);
          return;
        }
        at::Tensor product = d_through, value = d;
        at::mul_out(product, d, up);
        activate_backward(activation, d_through, d_through, through);
        activate(activation, d_up, through);
        const at::Tensor activated = d_up.clone();
        d_up.mul_(d);
        at::mul_out(value, activated, up);
      },
      d_value, d_pre, d_gate, pre, gate);
}

}  // namespace rtp
