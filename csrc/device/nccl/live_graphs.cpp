#include "device/nccl/live_graphs.h"

#include <thread>

#include "base/handles.h"

namespace rtp {
namespace {

using Count = std::shared_ptr<std::atomic<int>>;

cudaGraph_t captured_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // type of the CUDA runtime API
  cudaGraph_t graph = nullptr;
  RTP_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id, &graph));
  return graph;
}

}  // namespace

void LiveGraphs::add(cudaStream_t stream) {
  const uint64_t capture = capture_of(stream);
  if (capture == 0 || capture == last_) return;
  // CUDA calls back from a thread of its own when the last graph with a reference is gone; nothing of CUDA may be
  // called there (CUDA C++ Programming Guide, CUDA User Objects).
  auto owned = std::make_unique<Count>(count_);
  cudaUserObject_t object = nullptr;
  const auto freed = [](void* count) {
    const std::unique_ptr<Count> mine(static_cast<Count*>(count));
    --**mine;
  };
  RTP_CUDA_CHECK(cudaUserObjectCreate(&object, owned.get(), freed, 1, cudaUserObjectNoDestructorSync));
  ++*count_;
  static_cast<void>(owned.release());
  const cudaError_t retained = cudaGraphRetainUserObject(captured_graph(stream), object, 1, cudaGraphUserObjectMove);
  if (retained != cudaSuccess) cudaUserObjectRelease(object, 1);
  RTP_CUDA_CHECK(retained);
  last_ = capture;
}

int LiveGraphs::left(std::chrono::milliseconds patience) const {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (*count_ != 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *count_;
}

}  // namespace rtp
