// Directs the allocations of one thread to a memory pool.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>

#include <thread>

namespace rtp {

// While this object exists, allocations of the constructing thread come from `pool`.
class PoolScope {
 public:
  PoolScope(c10::DeviceIndex device, c10::cuda::MempoolId_t pool) : device_(device), pool_(pool) {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_, pool_,
        [mine = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == mine; });
  }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  ~PoolScope() {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, pool_);
    c10::cuda::CUDACachingAllocator::releasePool(device_, pool_);  // balances the use count of beginAllocateToPool
  }

 private:
  c10::DeviceIndex device_;
  c10::cuda::MempoolId_t pool_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
