// Several tensors to their places at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace rtp {

struct PackItem {
  at::Tensor from;
  at::Tensor to;  // of the same shape; overlaps no other
};

// to = from, cast to its dtype, for every item. On a GPU contiguous items go in one launch per 64 of them.
void pack(std::span<const PackItem> items);

}  // namespace rtp
