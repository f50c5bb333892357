#include "device/nccl/symmetric_memory.h"

#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "base/handles.h"
#include "base/pool_scope.h"

namespace rtp {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using CudaAllocator = caching::CUDAAllocator;

// Never destroyed: the caching allocator may return memory to it at any time.
const std::shared_ptr<CudaAllocator>& nccl_allocator() {
  static const auto* allocator =
      new std::shared_ptr<CudaAllocator>(torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
          [](size_t bytes, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            void* memory = nullptr;
            // On null, torch frees its cache, retries, and then raises an out-of-memory error.
            return ncclMemAlloc(&memory, bytes) == ncclSuccess ? memory : nullptr;
          },
          [](void* memory, size_t, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            ncclMemFree(memory);  // errors are ignored, because torch frees memory in destructors
          }));
  return *allocator;
}

// torch allocates a segment of 2 MiB for small tensors, of at least 20 MiB for larger ones, and of the exact size from
// kOwnSegment on.
constexpr int64_t kSmall = 1 << 20;
constexpr int64_t kOwnSegment = 10 << 20;

// Some versions of torch take shared ownership of an allocator, others a raw pointer.
template <typename Pool>
Pool make_pool() {
  if constexpr (std::is_constructible_v<Pool, const std::shared_ptr<CudaAllocator>&>) {
    return Pool(nccl_allocator());
  } else {
    return Pool(nccl_allocator().get());
  }
}

// A pool returns its memory to the GPU only when it is destroyed, hence one pool per allocation.
struct Allocation {
  at::cuda::MemPool pool = make_pool<at::cuda::MemPool>();
  at::Tensor memory;

  ~Allocation() { memory.reset(); }  // before the pool
};

}  // namespace

at::Tensor allocate_symmetric(int64_t bytes, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  const auto allocation = std::make_shared<Allocation>();
  const int64_t wanted = bytes <= kSmall ? std::max<int64_t>(bytes, 1) : std::max(bytes, kOwnSegment);
  {
    const PoolScope scope(device.index(), allocation->pool.id());
    allocation->memory = at::empty({wanted}, options);
  }
  void* data = allocation->memory.data_ptr();
  return at::from_blob(data, {bytes}, [allocation](void*) {}, options, device);
}

}  // namespace rtp
