#include "engine/shards/shard_source.h"

#include "base/checks.h"

namespace rtp {
namespace {

// The address of a tensor's first element, also if it has no elements.
const std::byte* start_of(const at::Tensor& tensor) {
  const auto* storage = static_cast<const std::byte*>(tensor.storage().data());
  return storage + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

void ShardSource::expect_counts(size_t addresses, size_t bytes, size_t offsets) const {
  const auto count = static_cast<size_t>(ranks_);
  RTP_CHECK_VALUE(addresses == count && bytes == count && offsets == count, "expected addresses, sizes and offsets of ",
                  ranks_, " ranks, got ", addresses, ", ", bytes, " and ", offsets);
}

void ShardSource::set_offsets(const std::byte* memory, const std::vector<int64_t>& own) {
  for (size_t parameter = 0; parameter < own.size(); ++parameter) parameters_[memory + own[parameter]] = parameter;
}

size_t ShardSource::parameter_of(const at::Tensor& local) const {
  const auto found = parameters_.find(start_of(local));
  RTP_CHECK_VALUE(found != parameters_.end(), "a shard of shape ", local.sizes(),
                  " is not in the memory that ranks read: expected the parameters that rotate_for_inference made, got "
                  "others in their place (by load_state_dict(assign=True), to(), to_empty() or a copy of the model): "
                  "convert the model in its final dtype, and change values by rtp_ext.update_weights");
  return found->second;
}

}  // namespace rtp
