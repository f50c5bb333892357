#include "device/graph_memory.h"

#include <ATen/cuda/MemPool.h>

#include <optional>

#include "base/pool_scope.h"

namespace rtp {
namespace {

// Marks the capture for the allocator. Without the mark, versions of torch that have this function query events of
// freed memory during a capture.
template <typename Allocator>
void mark_capture(Allocator* allocator, c10::DeviceIndex device, bool begins) {
  if constexpr (requires { allocator->markCaptureBegin(device); }) {
    begins ? allocator->markCaptureBegin(device) : allocator->markCaptureEnd(device);
  }
}

}  // namespace

struct GraphMemory::Pool {
  at::cuda::MemPool pool;
  std::optional<PoolScope> scope;
};

GraphMemory::GraphMemory(c10::Device device) : device_(device), pool_(std::make_unique<Pool>()) {}

GraphMemory::~GraphMemory() = default;

void GraphMemory::begin() {
  pool_->scope.emplace(device_.index(), pool_->pool.id());
  mark_capture(c10::cuda::CUDACachingAllocator::get(), device_.index(), true);
}

void GraphMemory::end() noexcept {
  if (!pool_->scope) return;
  mark_capture(c10::cuda::CUDACachingAllocator::get(), device_.index(), false);
  pool_->scope.reset();
}

}  // namespace rtp
