// Copies several arrays in one launch, with casts. Raw pointers only.
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

struct PackEntry {
  const void* from;
  void* to;  // must not overlap any `from` or any other `to`
  int64_t elements;
  Element from_type, to_type;  // equal types: elements are copied bit by bit
};

// The parameter of one launch.
struct PackBatch {
  static constexpr int kMost = 64;

  int count;
  PackEntry entries[kMost];
  int64_t first_tile[kMost + 1];  // set by the launch
};

// Enqueues the copies on `stream` (a cudaStream_t). Returns the cudaError_t of the launch.
int launch_pack(PackBatch batch, void* stream);

}  // namespace rtp
