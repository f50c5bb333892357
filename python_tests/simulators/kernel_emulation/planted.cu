// Kernels with one planted mistake each, which the emulation or the sanitizer must detect.
#include "kernels/common/launch.h"

namespace rtp {
namespace {

constexpr int kThreads = 64;

struct Values {
  float* values;
  int count;
};

// Each thread of a block gets its neighbour's value: a correct kernel.
__global__ void rotate_by_one(Values v) {
  RTP_SHARED(float, shared, kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = v.values[thread];
  __syncthreads();
  v.values[thread] = shared[(thread + 1) % kThreads];
}

__global__ void missing_barrier(Values v) {
  RTP_SHARED(float, shared, kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = v.values[thread];
  v.values[thread] = shared[(thread + 1) % kThreads];
}

// A barrier is missing before the second round overwrites values that the first round still reads.
__global__ void missing_second_barrier(Values v) {
  RTP_SHARED(float, shared, kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 2; ++round) {
    shared[thread] = v.values[thread];
    __syncthreads();
    v.values[thread] = shared[(thread + 1) % kThreads];
  }
}

__global__ void unwritten_shared(Values v) {
  RTP_SHARED(float, shared, kThreads);
  if (threadIdx.x > 0) shared[static_cast<int>(threadIdx.x)] = 1.0f;
  __syncthreads();
  v.values[threadIdx.x] = shared[static_cast<int>(threadIdx.x)];
}

__global__ void outside_shared(Values v) {
  RTP_SHARED(float, shared, kThreads);
  shared[static_cast<int>(threadIdx.x) + 1] = v.values[threadIdx.x];
}

__global__ void barrier_of_some(Values v) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  v.values[threadIdx.x] = 1.0f;
}

__global__ void shuffle_of_some(Values v) {
  if (threadIdx.x % 2 == 0) v.values[threadIdx.x] = __shfl_xor_sync(kAllLanes, v.values[threadIdx.x], 2);
}

__global__ void one_beyond(Values v) {
  for (int i = static_cast<int>(threadIdx.x); i <= v.count; i += kThreads) v.values[i] = 1.0f;
}

__global__ void misaligned_vector(Values v) {
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(v.values + 1) = uint4{1, 2, 3, 4};
}

// The compiler cannot detect that this sum is never set; otherwise the build would fail.
__global__ void unset_local(Values v) {
  float sums[4];
  if (v.count < 0) sums[0] = 0.0f;
  v.values[threadIdx.x] += sums[v.count % 4];
}

}  // namespace
}  // namespace rtp

extern "C" int planted(int which, float* values, int count) {
  using namespace rtp;
  void (*const kernels[])(Values) = {rotate_by_one,     missing_barrier, missing_second_barrier, unwritten_shared,
                                     outside_shared,    barrier_of_some, shuffle_of_some,        one_beyond,
                                     misaligned_vector, unset_local};
  return launch(kernels[which], {dim3(1), dim3(kThreads)}, nullptr, Values{values, count});
}
