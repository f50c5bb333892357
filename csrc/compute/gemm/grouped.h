// Grouped product: each group of rows is multiplied with its own matrix, in one launch if torch has a kernel for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace rtp {

// Returns why rows [M, K] and a stack of matrices [G, K, N] cannot use torch's grouped product; nothing if they can. It
// is used only if it is a single kernel without host synchronization: in bfloat16 on GPUs of compute capability 9 and
// 10. In all other cases torch reads the group sizes on the host and multiplies group by group, which this package does
// without synchronization. Each rank decides independently, because the hops do not depend on it. Source: PyTorch,
// aten/src/ATen/native/cuda/GroupedBlas.cpp (_grouped_mm_cuda), GroupedMMUtils.h.
std::optional<std::string> grouped_refusal(const at::Tensor& rows, const at::Tensor& stack);

// Returns [M, N]: rows [ends[g - 1], ends[g]) times stack[g]; ends [G] is int32. Call it only if grouped_refusal()
// returns nothing.
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& stack, const at::Tensor& ends);

// For tests: 9 or 10 makes any device choose like a GPU of that compute capability; 0 restores the real one.
void choose_grouped_as_on(int capability);

}  // namespace rtp
