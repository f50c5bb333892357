// What all rotated operations share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "engine/executor.h"

namespace rtp {

// How an operation rotates, and in which dtypes.
struct RotationOptions {
  Route route = Route::ring;
  bool in_place = false;
  at::ScalarType compute_dtype = at::kFloat;  // weights are cast to it before they travel
  at::ScalarType reduce_dtype = at::kFloat;   // partial gradients travel in it
  int64_t slot_cap = 0;                       // most bytes of a slot; larger shards travel in pieces. 0: no cap
  bool halves = false;                        // gradients of single linear layers travel in two halves
  std::string name;                           // of the module or function, for messages
};

// The first row of every owner's shard.
std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes);

// Rows of every owner's shard that travel in one pass; a shard above the slot cap takes several. Pieces are cut along
// the rows of a shard, so that each is contiguous.
struct Piece {
  std::vector<int64_t> offsets;  // of its first row in the shard of each owner
  std::vector<int64_t> sizes;

  // The piece of a whole shard (or gradient of one) of `owner`.
  at::Tensor of(const at::Tensor& shard, int owner) const { return shard.narrow(0, offsets[owner], sizes[owner]); }
};

// `rows`: of every owner's shard. `row_elements`: numbers that travel for one row; the wider of the dtypes of weights
// and gradients counts. At least one piece.
std::vector<Piece> pieces_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements);

// Shards that travel in pieces do so out of place: the room of a home shard is cut otherwise than a neighbour's. They
// are not gathered, since pieces are there to hold less than a whole shard.
RotationOptions piecewise(const RotationOptions& options, const std::vector<Piece>& pieces);

// A part whose dimension `dim` is cut: its shapes have `sizes[owner]` there and `shape` elsewhere.
Part cut_part(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim, const std::vector<int64_t>& sizes);

// Checks that `home` is this rank's contiguous shard of `part`.
void check_home(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& home,
                const Part& part);

// Whether GEMMs of this many rows and columns leave so much of the device idle in their last wave that two of them had
// better run side by side. `multiprocessors`: 0 means a CPU, which has no waves.
bool wastes_last_wave(int64_t rows, int64_t columns, int multiprocessors);

// The schedules of a pass over `weights`. In place where asked for and of use: a cast copy travels out of place in any
// case, and where hops can land in slots only, bringing a shard home takes a slot and a copy more.
Schedule forward_schedule(Executor& executor, const RotationOptions& options, const Cargo& weights,
                          bool two_lanes = false);

// Which gradients a backward pass makes, whether its weight gradients need what its input gradients computed, and what
// the operation lets the schedule do.
struct BackwardNeeds {
  bool dgrad = true;
  bool wgrad = true;
  bool bundle = false;
  bool halves = false;
  bool two_lanes = false;
};
Schedule backward_schedule(Executor& executor, const RotationOptions& options, const std::optional<Cargo>& weights,
                           const BackwardNeeds& needs);

}  // namespace rtp
