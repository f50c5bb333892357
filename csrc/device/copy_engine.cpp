#include "device/copy_engine.h"

namespace rtp {
namespace {

constexpr int kBatchVersion = 12080;  // first CUDA version with cudaMemcpyBatchAsync

#if CUDART_VERSION >= 12080
void copy_batch(const std::vector<Copy>& copies, cudaStream_t stream) {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  for (const Copy& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    bytes.push_back(copy.bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  RTP_CUDA_CHECK(
      cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream));
#else
  size_t failed = 0;
  RTP_CUDA_CHECK(cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), bytes.data(), copies.size(),
                                      &attributes, &first, 1, &failed, stream));
#endif
}
#else
void copy_batch(const std::vector<Copy>&, cudaStream_t) { RTP_ASSERT(false, "built without cudaMemcpyBatchAsync"); }
#endif

}  // namespace

CopyEngine::CopyEngine() {
  int driver = 0;
  RTP_CUDA_CHECK(cudaDriverGetVersion(&driver));
  batched_ = CUDART_VERSION >= kBatchVersion && driver >= kBatchVersion;
}

void CopyEngine::copy(const std::vector<Copy>& copies, cudaStream_t stream, bool captured) const {
  if (copies.empty()) return;
  if (batched_ && !captured) {
    copy_batch(copies, stream);
    return;
  }
  for (const Copy& copy : copies) {
    RTP_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
  }
}

}  // namespace rtp
