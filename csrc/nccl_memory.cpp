#include "nccl_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <thread>

#include "cuda_lanes.h"

extern "C" {

// For torch's CUDAPluggableAllocator, which looks them up by name.
__attribute__((visibility("default"))) void* rtp_nccl_malloc(size_t bytes, int device, cudaStream_t) {
  const rtp::DeviceScope scope(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)));
  void* memory = nullptr;
  return ncclMemAlloc(&memory, bytes) == ncclSuccess ? memory : nullptr;  // torch frees what it caches and asks again
}

__attribute__((visibility("default"))) void rtp_nccl_free(void* memory, size_t, int device, cudaStream_t) {
  const rtp::DeviceScope scope(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)));
  ncclMemFree(memory);
}

}  // extern "C"

namespace rtp {
namespace {

// torch cuts small tensors out of larger segments; multiples of this share no page with each other.
constexpr int64_t kGranularity = 2 << 20;

// While it lives, what this thread allocates comes from the pool.
class PoolScope {
 public:
  PoolScope(at::Device device, PoolId pool) : device_(device), pool_(pool) {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_.index(), pool_,
        [mine = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == mine; });
  }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  ~PoolScope() { c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool_); }

 private:
  at::Device device_;
  c10::cuda::MempoolId_t pool_;
};

}  // namespace

at::Tensor allocate_registrable(int64_t bytes, at::Device device, PoolId pool) {
  const int64_t rounded = (std::max<int64_t>(bytes, 1) + kGranularity - 1) / kGranularity * kGranularity;
  const PoolScope scope(device, pool);
  return at::empty({rounded}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace rtp
