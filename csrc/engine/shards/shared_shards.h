// Shards in memory that all ranks of a host map: a forward computes with another rank's shard where it lies.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/shards/host_shards.h"

namespace rtp {

// Maps the shards of all ranks; nothing is pulled.
class SharedShards : public HostShards {
 public:
  using HostShards::HostShards;

  bool survives_fork() const override { return true; }
  std::string address() const override { return map_address(); }
  void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
               const std::vector<std::vector<int64_t>>& offsets) override;
  std::shared_ptr<Pull> pull(const std::vector<size_t>& parameters, int owner,
                             const std::vector<at::Tensor>& targets) override;
};

}  // namespace rtp
