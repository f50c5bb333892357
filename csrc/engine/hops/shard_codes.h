// Codes of local shards that travel in 8 bits: see [Note: codes].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "compute/scaled.h"
#include "engine/hops/weak_tensor.h"

namespace rtp {

// [Note: codes]
// The owner of a shard quantizes it once after each change: all micro-batches, passes and recomputations between two
// optimizer steps send the same codes. Gradients, optimizers and checkpoints know the wide shard alone. A change shows
// in the version counter of the parameter, as for hops that are sent ahead (engine/prefetch.h); these make the codes of
// the pass that they belong to before they leave. New codes take the place of old ones in the same memory, on the
// compute stream, which the end of a pass orders after the hops that read them.

// How a local shard, a matrix or a stack of them, becomes codes. It is rounded to `dtype` first, in which the product
// would be computed without 8 bits. `inputs_first`: matrices are stored as [inputs, outputs].
struct Coding {
  CodePlane plane;
  at::ScalarType dtype;
  bool inputs_first = false;
  bool operator==(const Coding&) const = default;
};

// The codes of one local shard in one plane.
class ShardCodes {
 public:
  // `made`: counts how often codes are made.
  ShardCodes(const at::Tensor& shard, const Coding& coding, int64_t& made);

  // Makes the codes unless those of this version of the parameter are there: nothing if it is not known, and of an
  // inference tensor it never is. Without effect if the shard's memory has been freed.
  void refresh(std::optional<int64_t> version);
  bool current(std::optional<int64_t> version) const { return versioned_ && version && version_ == version; }
  // Sets the largest magnitude of the whole weight, for a plane with one scale of all shards, and the version of the
  // shard in it. Another one makes codes old.
  void set_amax(float amax, std::optional<int64_t> version);
  // Fails if the shard has been written since its ranks exchanged the largest magnitude: larger numbers would saturate.
  void expect_amax(std::optional<int64_t> version) const;
  const CodeMemory& memory() const { return memory_; }
  bool alive() const { return shard_.lock().defined(); }
  bool of(const at::Tensor& shard, const Coding& coding) const { return of(shard) && coding == coding_; }
  bool of(const at::Tensor& shard) const { return shard_.is(shard); }
  int64_t bytes() const { return static_cast<int64_t>(memory_.codes.nbytes() + memory_.scales.nbytes()); }

 private:
  WeakTensor shard_;
  Coding coding_;
  bool versioned_;
  CodeMemory memory_;
  std::optional<int64_t> version_;
  std::optional<float> amax_;
  std::optional<int64_t> amax_version_;
  int64_t& made_;
};

// The codes of all local shards of a ring, each as long as the memory of its shard.
class CodeCache {
 public:
  std::shared_ptr<ShardCodes> of(const at::Tensor& shard, const Coding& coding);
  // Drops the codes of a shard to which writes may show in no version counter: a new forward makes new ones.
  void forget(const at::Tensor& shard);
  // Sets the largest magnitude of the whole weight that a shard is a part of, which the ranks have exchanged in this
  // phase (see Prefetcher) for this version of the shard, and returns whether they have.
  void set_amax(const at::Tensor& shard, float amax, std::optional<int64_t> version, int64_t phase);
  bool has_amax(const at::Tensor& shard, int64_t phase) const;
  int64_t bytes() const;
  int64_t made() const { return made_; }  // how often codes were made

 private:
  struct Amax {
    WeakTensor shard;
    float value;
    std::optional<int64_t> version;
    int64_t phase;
  };
  const Amax* amax_of(const at::Tensor& shard) const;

  int64_t made_ = 0;
  std::multimap<const void*, std::shared_ptr<ShardCodes>> codes_;  // by address of the shard
  std::multimap<const void*, Amax> amaxes_;                        // the same
};

}  // namespace rtp
