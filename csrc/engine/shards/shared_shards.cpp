#include "engine/shards/shared_shards.h"

#include "base/checks.h"

namespace rtp {

void SharedShards::connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                           const std::vector<std::vector<int64_t>>& offsets) {
  expect_counts(addresses.size(), bytes.size(), offsets.size());
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer != rank()) map(peer, addresses[peer], bytes[peer]);
  }
  set_all_offsets(offsets);
}

std::shared_ptr<Pull> SharedShards::pull(const std::vector<size_t>&, int owner, const std::vector<at::Tensor>&) {
  throw RotationError(concat("the shards of rank ", owner, " are not connected"));
}

}  // namespace rtp
