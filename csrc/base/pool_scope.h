// Allocations of one thread from a pool of its own.
#pragma once

#ifdef RTP_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>

#include <thread>

namespace rtp {

// While it lives, what this thread allocates comes from the pool.
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
    c10::cuda::CUDACachingAllocator::releasePool(device_, pool_);  // the use that the beginning counted
  }

 private:
  c10::DeviceIndex device_;
  c10::cuda::MempoolId_t pool_;
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
