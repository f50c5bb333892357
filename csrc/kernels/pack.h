// Copying several arrays to their places, casting them on the way, in one launch. Plain pointers.
#pragma once

#include <cstdint>

#include "kernels/common/elements.h"

namespace rtp {

struct PackEntry {
  const void* from;
  void* to;  // of no `from`, nor of another `to`
  int64_t elements;
  Element from_type, to_type;  // where they are equal, elements are copied bit by bit
};

// What one launch takes as its parameter.
struct PackBatch {
  static constexpr int kMost = 64;

  int count;
  PackEntry entries[kMost];
  int64_t first_tile[kMost + 1];  // set by the launch
};

// Enqueues the copies on `stream` (a cudaStream_t). Returns the cudaError_t of the launch.
int launch_pack(PackBatch batch, void* stream);

}  // namespace rtp
