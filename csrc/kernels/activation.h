// Hidden values of MLPs and experts, and their gradients, each in one pass over memory. Raw pointers only.
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

enum class Activation : uint8_t { relu, gelu, gelu_tanh, silu };

// value = act(pre), or act(gate) * pre if there is a gate. All are [rows, columns] with contiguous rows that start
// every *_stride elements. Computed in float32 and rounded once.
struct HiddenForward {
  Element type;
  Activation activation;
  int64_t rows, columns;
  const void* pre;
  const void* gate;  // null: none
  void* value;
  int64_t pre_stride, gate_stride, value_stride;
  int64_t windows;  // set by the launch
};

// value as above, and the gradients of pre and gate, given d_value, the gradient of value. Without a gate, d_gate is
// not written. One result may alias d_value with the same stride.
struct HiddenBackward {
  Element type;
  Activation activation;
  int64_t rows, columns;
  const void* d_value;
  const void* pre;
  const void* gate;  // null: none
  void* value;
  void* d_pre;
  void* d_gate;
  int64_t d_value_stride, pre_stride, gate_stride, value_stride, d_pre_stride, d_gate_stride;
  int64_t windows;  // set by the launch
};

// Enqueue on `stream` (a cudaStream_t). Return the cudaError_t of the launch.
int launch_hidden_forward(HiddenForward hidden, void* stream);
int launch_hidden_backward(HiddenBackward hidden, void* stream);

}  // namespace rtp
