// What travels together, and how it lies in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace rtp {

// One tensor of a bundle: its dtype and its shape for every owner.
struct Part {
  at::ScalarType dtype;
  std::vector<std::vector<int64_t>> shapes;

  int64_t elements(int owner) const;
  int64_t bytes(int owner) const;
  int64_t whole_bytes() const;
};

// Tensors that travel together, and this rank's own ones. In a slot the parts of one shard lie one after the other; in
// a slot of all shards, the rows of all owners of each part do.
struct Cargo {
  std::vector<Part> parts;
  std::vector<at::Tensor> home;

  int64_t offset(int owner, size_t part) const;  // in bytes, in a slot
  int64_t slot_bytes() const;                    // of a slot that any owner's shard fits into
  int64_t whole_offset(int owner, size_t part) const;
  int64_t whole_bytes() const;

  at::Tensor in_slot(const at::Tensor& memory, int owner, size_t part) const;
  at::Tensor in_whole(const at::Tensor& memory, int owner, size_t part) const;  // owner may be kAllOwners
  // A home tensor, seen as the shard of `owner` while that passes through it.
  at::Tensor at_home(int owner, int rank, size_t part) const;

  // Copies the home tensors into `memory`, laid out as in a slot and cast, and lets the copies take their place. What
  // is undefined is not copied.
  void stage(const at::Tensor& memory, int rank);

  // The same for one half of the rows of every shard.
  Cargo rows(Half half, int rank) const;
};

// The first row of one half of `rows` rows, and how many it has.
struct HalfRows {
  int64_t first, count;
};
HalfRows half_rows(Half half, int64_t rows);

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors);

}  // namespace rtp
