// One product for each group of rows with its own matrix, in one launch where torch has a kernel for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace rtp {

// Why rows [M, K] and a stack of matrices [G, K, N] are not put to torch's grouped product; nothing where they are. It
// is taken where it is one kernel and waits for nothing: in bfloat16 on GPUs of compute capability 9 and 10. For all
// others torch reads the sizes of the groups on the host and multiplies one after the other, as we do without waiting.
// Each rank chooses for itself: it changes no hop.
// Source: PyTorch, aten/src/ATen/native/cuda/GroupedBlas.cpp (_grouped_mm_cuda), GroupedMMUtils.h.
std::optional<std::string> grouped_refusal(const at::Tensor& rows, const at::Tensor& stack);

// [M, N]: rows [ends[g - 1], ends[g]) times stack[g]; ends [G] int32. Only what is not refused.
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& stack, const at::Tensor& ends);

// For tests: 9 or 10 to choose on any device as a GPU of that compute capability would; 0 ends it.
void choose_grouped_as_on(int capability);

}  // namespace rtp
