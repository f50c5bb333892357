#include "nccl_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <thread>
#include <vector>

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

// From this size on torch gives every tensor a segment of its own, which is a multiple of this.
constexpr int64_t kOwnSegment = 10 << 20;
constexpr int64_t kGranularity = 2 << 20;

bool starts_segment(const at::Tensor& tensor) {
  size_t bytes = 0;
  return c10::cuda::CUDACachingAllocator::getBaseAllocation(tensor.data_ptr(), &bytes) == tensor.data_ptr();
}

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
  const int64_t rounded = (std::max(bytes, kOwnSegment) + kGranularity - 1) / kGranularity * kGranularity;
  const PoolScope scope(device, pool);
  std::vector<at::Tensor> elsewhere;  // kept until one is found, so that the next try gets another place
  while (true) {
    at::Tensor memory = at::empty({rounded}, at::TensorOptions().dtype(at::kByte).device(device));
    if (starts_segment(memory)) return memory;
    elsewhere.push_back(std::move(memory));
  }
}

}  // namespace rtp
