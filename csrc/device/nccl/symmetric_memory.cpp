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

// Lives as long as the process: the caching allocator may hand memory back to it at any time.
const std::shared_ptr<CudaAllocator>& nccl_allocator() {
  static const auto* allocator =
      new std::shared_ptr<CudaAllocator>(torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
          [](size_t bytes, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            void* memory = nullptr;
            // Null makes torch free what it caches, try again, and then say that memory ran out.
            return ncclMemAlloc(&memory, bytes) == ncclSuccess ? memory : nullptr;
          },
          [](void* memory, size_t, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            ncclMemFree(memory);  // torch frees in destructors: where the GPU is lost, so is the memory
          }));
  return *allocator;
}

// torch gives small tensors a segment of 2 MiB, others one of at least 20 MiB, and from kOwnSegment on one of their
// size.
constexpr int64_t kSmall = 1 << 20;
constexpr int64_t kOwnSegment = 10 << 20;

// Some versions of torch share the ownership of an allocator, others take a pointer to what lives on elsewhere.
template <typename Pool>
Pool make_pool() {
  if constexpr (std::is_constructible_v<Pool, const std::shared_ptr<CudaAllocator>&>) {
    return Pool(nccl_allocator());
  } else {
    return Pool(nccl_allocator().get());
  }
}

// A pool gives its memory back to the GPU only when it ends, hence one for each allocation.
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
