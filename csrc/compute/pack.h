// Copies several tensors in one launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace rtp {

struct PackItem {
  at::Tensor from;
  at::Tensor to;  // same shape as `from`; overlaps no other tensor
};

// to = from, cast to the dtype of `to`, for every item. On a GPU, one launch copies up to 64 contiguous items.
void pack(std::span<const PackItem> items);

}  // namespace rtp
