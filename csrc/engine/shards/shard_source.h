// Where a forward gets the shards of other ranks when no hop brings them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace rtp {

// Shards on their way from their owner into memory of this rank.
class Pull {
 public:
  virtual ~Pull() = default;
  // Orders the computes that follow after the arrival. Throws the error of the pull.
  virtual void wait() = 0;
  // Gives the pull up, without an error of it: its target may be used for something else afterwards.
  virtual void drop() noexcept = 0;
};

// The shards of one rank, in memory of their own, and the way to those of the other ranks.
class ShardSource {
 public:
  ShardSource(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  ShardSource(const ShardSource&) = delete;
  ShardSource& operator=(const ShardSource&) = delete;
  virtual ~ShardSource() = default;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // The number of hosts among which a forward alternates: see Schedule.
  virtual int hosts() const { return 1; }
  // Where this rank's shards lie.
  virtual at::Device device() const = 0;
  // The memory of one shard of this rank, as bytes. It lives as long as a tensor refers to it.
  virtual at::Tensor memory(int64_t offset, int64_t bytes) const = 0;

  virtual std::string address() const = 0;
  // Connects all ranks. `bytes`: of each rank's memory; `offsets`: by rank, the byte offset of every parameter's shard.
  // Throws RotationError that names an unreachable rank.
  virtual void connect(const std::vector<std::string>& addresses, const std::vector<int64_t>& bytes,
                       const std::vector<std::vector<int64_t>>& offsets) = 0;

  // Returns the index of the parameter whose shard here is `local`. Throws ValueError if it is not in the memory.
  size_t parameter_of(const at::Tensor& local) const;
  // Returns whether the shards of `owner` can be read where they lie, by `at`; otherwise `pull` copies them.
  virtual bool maps(int owner) const = 0;
  // Returns the shard of `owner`, of this shape, of a parameter whose shard on this rank is `local`.
  virtual at::Tensor at(size_t parameter, const at::Tensor& local, int owner,
                        const std::vector<int64_t>& shape) const = 0;
  // Starts to copy the shards of `owner` of these parameters into `targets`, after all computes so far. Pulls run one
  // after the other, in this order.
  virtual std::shared_ptr<Pull> pull(const std::vector<size_t>& parameters, int owner,
                                     const std::vector<at::Tensor>& targets) = 0;
  // Returns whether a process forked from this one can use the source: it runs no threads.
  virtual bool survives_fork() const { return false; }
  // Returns memory to pull into that this source prefers; undefined if any will do.
  virtual at::Tensor allocate(int64_t) { return {}; }
  // A forward of the model has ended: shards may change now.
  virtual void end_forward() {}

  // The bytes that have come from owners by pulls, and those that have come from another rank of this host instead.
  int64_t pulled_bytes() const { return pulled_bytes_.load(); }
  int64_t shared_bytes() const { return shared_bytes_.load(); }

  // Ends connections and threads. Idempotent.
  virtual void close() noexcept {}

 protected:
  void expect_counts(size_t addresses, size_t bytes, size_t offsets) const;
  void set_offsets(const std::byte* memory, const std::vector<int64_t>& own);

  std::atomic<int64_t> pulled_bytes_{0}, shared_bytes_{0};

 private:
  const int rank_;
  const int ranks_;
  std::unordered_map<const std::byte*, size_t> parameters_;  // by address of the shard
};

}  // namespace rtp
