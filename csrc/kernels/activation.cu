#include "kernels/activation.h"
#include "kernels/common/windows.cuh"

namespace rtp {
namespace {

constexpr int kThreads = 256;
constexpr float kSqrtHalf = 0.70710678118654752f;       // 1 / sqrt(2)
constexpr float kNormalDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)
constexpr float kTanhScale = 0.79788456080286536f;      // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;
constexpr float kTanhFlat = 64.0f;  // beyond this, the tanh of gelu_tanh is exactly 1 in float32, and x^3 may overflow

// Returns act(x) and sets dx, the gradient of x, given d, the gradient of act(x).
template <Activation kActivation>
__device__ float activate(float x, float d, float& dx) {
  if constexpr (kActivation == Activation::relu) {
    dx = x <= 0.0f ? 0.0f : d;  // propagates NaNs, as in torch
    return x <= 0.0f ? 0.0f : x;
  } else if constexpr (kActivation == Activation::gelu) {
    const float below = 0.5f * (1.0f + erff(x * kSqrtHalf));
    dx = d * (below + x * kNormalDensity * expf(-0.5f * x * x));
    return x * below;
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    const float near = fminf(fmaxf(x, -kTanhFlat), kTanhFlat);
    const float t = tanhf(kTanhScale * near * (1.0f + kTanhCubic * near * near));
    const float slope = 0.5f * near * (1.0f - t * t) * kTanhScale * (1.0f + 3.0f * kTanhCubic * near * near);
    const float factor = 0.5f * (1.0f + t);
    dx = d * (factor + slope);
    return x * factor;
  } else {
    static_assert(kActivation == Activation::silu);
    const float sigmoid = __fdividef(1.0f, 1.0f + expf(-x));
    dx = d * sigmoid * (1.0f + x * (1.0f - sigmoid));
    return x * sigmoid;
  }
}

template <Activation kActivation, typename T>
__global__ void hidden_forward(HiddenForward hidden) {
  constexpr int kWidth = kWindow<T>;
  for_each_window(hidden.rows, hidden.windows, [&](int64_t row, int64_t window) {
    T* const value = static_cast<T*>(hidden.value) + row * hidden.value_stride;
    const int64_t first = window * kWidth - shift_of(value);
    float x[kWidth], out[kWidth], unused;
    load_floats(x, static_cast<const T*>(hidden.pre) + row * hidden.pre_stride, first, hidden.columns);
    if (hidden.gate == nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] = activate<kActivation>(x[i], 0.0f, unused);
    } else {
      float gate[kWidth];
      load_floats(gate, static_cast<const T*>(hidden.gate) + row * hidden.gate_stride, first, hidden.columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] = activate<kActivation>(gate[i], 0.0f, unused) * x[i];
    }
    store_floats(value, first, hidden.columns, out);
  });
}

template <Activation kActivation, typename T>
__global__ void hidden_backward(HiddenBackward hidden) {
  constexpr int kWidth = kWindow<T>;
  for_each_window(hidden.rows, hidden.windows, [&](int64_t row, int64_t window) {
    T* const value = static_cast<T*>(hidden.value) + row * hidden.value_stride;
    const int64_t first = window * kWidth - shift_of(value);
    float d[kWidth], x[kWidth], out[kWidth], dx[kWidth];
    load_floats(d, static_cast<const T*>(hidden.d_value) + row * hidden.d_value_stride, first, hidden.columns);
    load_floats(x, static_cast<const T*>(hidden.pre) + row * hidden.pre_stride, first, hidden.columns);
    T* const d_pre = static_cast<T*>(hidden.d_pre) + row * hidden.d_pre_stride;
    if (hidden.gate == nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] = activate<kActivation>(x[i], d[i], dx[i]);
      store_floats(d_pre, first, hidden.columns, dx);
    } else {
      float gate[kWidth], d_gate[kWidth];
      load_floats(gate, static_cast<const T*>(hidden.gate) + row * hidden.gate_stride, first, hidden.columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float through = activate<kActivation>(gate[i], d[i] * x[i], d_gate[i]);
        dx[i] = d[i] * through;
        out[i] = through * x[i];
      }
      store_floats(d_pre, first, hidden.columns, dx);
      store_floats(static_cast<T*>(hidden.d_gate) + row * hidden.d_gate_stride, first, hidden.columns, d_gate);
    }
    store_floats(value, first, hidden.columns, out);
  });
}

// The kernel for an activation and an element type.
template <typename Parameter>
using Kernel = void (*)(Parameter);

template <typename T>
Kernel<HiddenForward> kernel_of(const HiddenForward& hidden) {
  switch (hidden.activation) {
    case Activation::relu:
      return hidden_forward<Activation::relu, T>;
    case Activation::gelu:
      return hidden_forward<Activation::gelu, T>;
    case Activation::gelu_tanh:
      return hidden_forward<Activation::gelu_tanh, T>;
    default:
      return hidden_forward<Activation::silu, T>;
  }
}

template <typename T>
Kernel<HiddenBackward> kernel_of(const HiddenBackward& hidden) {
  switch (hidden.activation) {
    case Activation::relu:
      return hidden_backward<Activation::relu, T>;
    case Activation::gelu:
      return hidden_backward<Activation::gelu, T>;
    case Activation::gelu_tanh:
      return hidden_backward<Activation::gelu_tanh, T>;
    default:
      return hidden_backward<Activation::silu, T>;
  }
}

template <typename T, typename Hidden>
int launch_typed(Hidden& hidden, void* stream) {
  hidden.windows =
      windows_of(static_cast<const T*>(hidden.value), hidden.value_stride, hidden.rows, hidden.columns, kWindow<T>);
  return launch(kernel_of<T>(hidden), tile_launch(hidden.rows, hidden.windows, kThreads), stream, hidden);
}

template <typename Hidden>
int launch_hidden(Hidden& hidden, void* stream) {
  if (hidden.rows == 0 || hidden.columns == 0) return 0;
  switch (hidden.type) {
    case Element::float32:
      return launch_typed<float>(hidden, stream);
    case Element::bfloat16:
      return launch_typed<__nv_bfloat16>(hidden, stream);
    default:
      return launch_typed<__half>(hidden, stream);
  }
}

}  // namespace

// Rows without gaps are treated as one row.
int launch_hidden_forward(HiddenForward hidden, void* stream) {
  const int64_t columns = hidden.columns;
  if (hidden.pre_stride == columns && hidden.value_stride == columns &&
      (hidden.gate == nullptr || hidden.gate_stride == columns)) {
    hidden.columns *= hidden.rows;
    hidden.rows = 1;
  }
  return launch_hidden(hidden, stream);
}

int launch_hidden_backward(HiddenBackward hidden, void* stream) {
  const int64_t columns = hidden.columns;
  const bool gate_dense = hidden.gate == nullptr || (hidden.gate_stride == columns && hidden.d_gate_stride == columns);
  if (hidden.d_value_stride == columns && hidden.pre_stride == columns && hidden.value_stride == columns &&
      hidden.d_pre_stride == columns && gate_dense) {
    hidden.columns *= hidden.rows;
    hidden.rows = hidden.columns > 0 ? 1 : 0;
  }
  return launch_hidden(hidden, stream);
}

}  // namespace rtp
