// Where a forward gets the shards of other ranks when no hop brings them: see SharedShards and PulledShards.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/hops/slots.h"
#include "transport/shm/shared_memory.h"

namespace rtp {

// The shards of one rank, in memory of their own, and the way to those of the other ranks.
class ShardSource {
 public:
  // Allocates `bytes` bytes for this rank's shards.
  ShardSource(int rank, int ranks, int64_t bytes);
  ShardSource(const ShardSource&) = delete;
  ShardSource& operator=(const ShardSource&) = delete;
  virtual ~ShardSource() = default;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // The memory of one shard of this rank, as bytes. It lives as long as a tensor refers to it.
  at::Tensor memory(int64_t offset, int64_t bytes) const;

  virtual std::string address() const = 0;
  // Connects all ranks. `bytes`: of each rank's memory; `offsets`: by rank, the byte offset of every parameter's shard.
  // Throws RotationError that names an unreachable rank.
  virtual void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                       const std::vector<std::vector<int64_t>>& offsets) = 0;

  // Returns whether the shards of other ranks can be read where they lie, by `at`; otherwise `pull` copies them.
  virtual bool maps() const = 0;
  // Returns the shard of `owner`, of this shape, of the parameter whose shard on this rank is `local`.
  virtual at::Tensor at(const at::Tensor& local, int owner, const std::vector<int64_t>& shape) const;
  // Copies the shards of `owner` of the parameters whose shards here are `local` into `targets`.
  virtual void pull(const std::vector<at::Tensor>& local, int owner, const std::vector<at::Tensor>& targets);

  // Ends connections and threads. Idempotent.
  virtual void close() noexcept {}

 protected:
  void expect_counts(size_t addresses, size_t bytes, size_t offsets) const;
  void set_offsets(const std::vector<int64_t>& own);
  std::byte* own_data() const;
  int64_t own_bytes() const;
  const SharedMemory& own() const { return *own_; }
  uint64_t number() const;  // identifies the memory
  // Returns the index of the parameter whose shard here is `local`. Throws ValueError if it is not in the memory.
  size_t parameter_of(const at::Tensor& local) const;

  static constexpr size_t kHeader = 64;  // bytes before the shards: the number of the memory

 private:
  const int rank_;
  const int ranks_;
  std::shared_ptr<SharedMemory> own_;
  std::unordered_map<const std::byte*, size_t> parameters_;  // by address of the shard
};

// The shards that one pass computes with.
class SourcedWeights {
 public:
  ~SourcedWeights() { abandon(); }

  // Sets the owners whose shards the pass will ask for; without a call, all.
  void expect(std::vector<bool> owners) { expected_ = std::move(owners); }
  // Returns the shard of `owner` of each tensor of a bundle, in the compute dtype or in blocks: where it lies, or in a
  // slot, valid until the owner after the next. Starts to pull the shard of the owner that a forward asks for next.
  const std::vector<at::Tensor>& of(SlotPool& pool, ShardSource& source, const ShardBundle& bundle, int owner);
  void give_back(SlotPool& pool);

 private:
  // Returns the owner that a forward asks for after `owner`; that of this rank: none.
  int next(const ShardSource& source, int owner) const;
  std::vector<at::Tensor> in_slot(SlotPool& pool, const ShardBundle& bundle, int owner, size_t slot);
  void abandon() noexcept;

  std::vector<bool> expected_;  // by owner; empty: all
  std::vector<at::Tensor> tensors_;
  int owner_ = kAllOwners;  // of `tensors_`
  std::array<std::shared_ptr<Slot>, 2> slots_;
  size_t slot_ = 0;           // of the newest pull
  int coming_ = kAllOwners;   // owner of the pull in flight
  std::future<void> pulled_;  // valid while a pull is in flight
};

}  // namespace rtp
