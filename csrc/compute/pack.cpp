#include "compute/pack.h"

#include "compute/kernel_tensors.h"
#include "kernels/pack.h"

namespace rtp {
namespace {

#ifdef RTP_WITH_CUDA
// Returns the kernel entry for an item; nothing if ATen must copy it.
std::optional<PackEntry> entry_of(const PackItem& item) {
  if (!item.from.is_cuda() || item.from.device() != item.to.device()) return std::nullopt;
  if (!item.from.is_contiguous() || !item.to.is_contiguous()) return std::nullopt;
  const void* from = item.from.const_data_ptr();
  void* to = item.to.data_ptr();
  if (item.from.scalar_type() == item.to.scalar_type()) {
    // Copies bits, in words of four or two bytes.
    const auto bytes = static_cast<uint64_t>(item.from.nbytes());
    const uint64_t alignment = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes;
    const auto words = static_cast<int64_t>(bytes);
    if (alignment % 4 == 0) return PackEntry{from, to, words / 4, Element::float32, Element::float32};
    if (alignment % 2 == 0) return PackEntry{from, to, words / 2, Element::float16, Element::float16};
    return std::nullopt;
  }
  const auto from_type = element_of(item.from.scalar_type());
  const auto to_type = element_of(item.to.scalar_type());
  if (!from_type || !to_type) return std::nullopt;
  return PackEntry{from, to, item.from.numel(), *from_type, *to_type};
}
#endif

}  // namespace

void pack(std::span<const PackItem> items) {
  for (const PackItem& item : items) {
    RTP_CHECK_VALUE(item.from.sizes() == item.to.sizes(), "expected a destination of shape ", item.from.sizes(),
                    ", got ", item.to.sizes());
  }
#ifdef RTP_WITH_CUDA
  PackBatch batch{};
  at::Tensor last;
  const auto flush = [&] {
    if (batch.count > 0) launch_on_device_of(last, [&](void* stream) { return launch_pack(batch, stream); });
    batch.count = 0;
  };
  for (const PackItem& item : items) {
    const std::optional<PackEntry> entry = entry_of(item);
    if (!entry) {
      item.to.copy_(item.from);
      continue;
    }
    if (batch.count == PackBatch::kMost || (batch.count > 0 && last.device() != item.to.device())) flush();
    batch.entries[batch.count++] = *entry;
    last = item.to;
  }
  flush();
#else
  for (const PackItem& item : items) item.to.copy_(item.from);
#endif
}

}  // namespace rtp
