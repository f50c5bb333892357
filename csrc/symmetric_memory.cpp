#include "symmetric_memory.h"

#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "handles.h"

namespace rtp {
namespace {

using CudaAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

// Lives as long as the process: the caching allocator may hand memory back to it at any time.
const std::shared_ptr<CudaAllocator>& nccl_allocator() {
  static const auto* allocator =
      new std::shared_ptr<CudaAllocator>(torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
          [](size_t bytes, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            void* memory = nullptr;
            RTP_NCCL_CHECK(ncclMemAlloc(&memory, bytes));
            return memory;
          },
          [](void* memory, size_t, int device, cudaStream_t) {
            const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
            RTP_NCCL_CHECK(ncclMemFree(memory));
          }));
  return *allocator;
}

// A pool gives its memory back to the GPU only when it ends, hence one for each allocation.
struct Allocation {
  at::cuda::MemPool pool{nccl_allocator()};
  at::Tensor memory;

  ~Allocation() { memory.reset(); }  // before the pool
};

}  // namespace

at::Tensor allocate_symmetric(int64_t bytes, at::Device device) {
  namespace caching = c10::cuda::CUDACachingAllocator;
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  const auto allocation = std::make_shared<Allocation>();
  const auto id = allocation->pool.id();
  caching::beginAllocateToPool(device.index(), id,
                               [thread = std::this_thread::get_id()](cudaStream_t) {  // of this thread, on any stream
                                 return std::this_thread::get_id() == thread;
                               });
  try {
    allocation->memory = at::empty({std::max<int64_t>(bytes, 1)}, options);
  } catch (...) {
    caching::endAllocateToPool(device.index(), id);
    throw;
  }
  caching::endAllocateToPool(device.index(), id);
  void* data = allocation->memory.data_ptr();
  return at::from_blob(data, {bytes}, [allocation](void*) {}, options, device);
}

}  // namespace rtp
