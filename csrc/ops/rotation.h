// What all rotated operations share.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/executor.h"
#include "schedule/waves.h"

namespace rtp {

// How an operation rotates, and in which dtypes.
struct RotationOptions {
  Route route = Route::ring;
  bool in_place = false;
  at::ScalarType compute_dtype = at::kFloat;  // weights are cast to it before they travel
  at::ScalarType reduce_dtype = at::kFloat;   // partial gradients travel in it
  int64_t slot_cap = 0;                       // most bytes of a slot; larger shards travel in pieces. 0: no cap
  bool halves = false;                        // gradients of single linear layers travel in two halves
  bool deferred = false;                      // a backward may end before the last gradient hop has arrived
  std::string name;                           // of the module or function, for messages
  Wire wire = Wire::plain;                    // what weights travel in, where that is less than the compute dtype
  GradientRoute gradient_route = GradientRoute::chain;  // direct neither on route gather nor on two levels
  bool gradients_quantized = false;  // of gradient route direct: they travel in 8 bits, with block scales

  // What gradients are summed in at home. A sum that travels is rounded at every rank anyway.
  at::ScalarType local_dtype() const;
  bool rounded() const { return gradients_quantized || local_dtype() != reduce_dtype; }
};

// The first row of every owner's shard.
std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes);

// Rows of every owner's shard that travel in one pass; a shard above the slot cap takes several. Pieces are cut along
// the rows of a shard, so that each is contiguous.
struct Chunk {
  std::vector<int64_t> offsets;  // of its first row in the shard of each owner
  std::vector<int64_t> sizes;
  bool alone = true;  // there is no other

  // The piece of a whole shard (or gradient of one) of `owner`, or of several.
  at::Tensor of(const at::Tensor& shard, int owner) const {
    return alone ? shard : shard.narrow(0, offsets[owner], sizes[owner]);
  }
  std::vector<at::Tensor> of(std::vector<at::Tensor> shards, int owner) const {
    for (at::Tensor& shard : shards) shard = of(shard, owner);
    return shards;
  }
};

// `rows`: of every owner's shard. `row_elements`: numbers that travel for one row; the wider of the dtypes of weights
// and gradients counts. At least one piece.
std::vector<Chunk> chunks_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements);

// Shards that travel in pieces do so out of place: the room of a local shard is cut otherwise than a neighbour's. They
// are not gathered, since pieces are there to hold less than a whole shard.
RotationOptions chunked(const RotationOptions& options, const Chunk& chunk);

// A part whose dimension `dim` is cut: its shapes have `sizes[owner]` there and `shape` elsewhere.
TensorLayout cut_layout(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim,
                        const std::vector<int64_t>& sizes);

// Weights that travel: their parts, in the compute dtype, and this rank's own. Those of `dims` dimensions and more
// travel in what the options say, on a ring of several; biases, which have fewer, as they are.
ShardBundle travelling_weights(const Executor& executor, const RotationOptions& options,
                               std::vector<TensorLayout> layouts, std::vector<at::Tensor> local, size_t dims = 2);

// Checks that `home` is this rank's contiguous shard of `part`.
void check_local(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& local,
                 const TensorLayout& part);

// The schedules of a pass over `weights`, in place where asked for and of use: see Travel.
const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const ShardBundle& weights,
                                 bool two_streams = false);

// Which gradients a backward pass makes, whether its weight gradients need what its input gradients computed, and what
// the operation lets the schedule do.
struct BackwardNeeds {
  bool dgrad = true;
  bool wgrad = true;
  bool bundle = false;
  bool halves = false;
  bool two_streams = false;
};
const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<ShardBundle>& weights, const BackwardNeeds& needs);

// Gradients as they travel; their local tensors are in the local dtype.
ShardBundle travelling_gradients(ShardBundle gradients, const RotationOptions& options);

// The gradients of an operation's parameters in its backward.
//
// Which gradients are wanted, where each lies among those that travel, what of it has arrived and what goes out, and
// the scale that makes a mean of the sum. Parameters are named by their place among the operation's; -1: there is none.
class Gradients {
 public:
  // `parts`: of the gradients of all parameters, whole shards, in the reduce dtype. Allocates this rank's own ones.
  Gradients(Executor& executor, const RotationOptions& options, std::vector<TensorLayout> layouts,
            const std::vector<bool>& wanted);

  bool any() const { return !local_.empty(); }
  bool wants(int parameter) const { return parameter >= 0 && place_[static_cast<size_t>(parameter)] >= 0; }
  double scale() const { return scale_; }  // 1 / ranks

  // What travels in one pass; nothing where no gradient is wanted. `piece` of the parts of all parameters: what it
  // takes of a home gradient is `of`.
  std::optional<ShardBundle> bundle() const;
  std::optional<ShardBundle> bundle(const std::vector<TensorLayout>& chunk,
                                    const std::function<at::Tensor(const at::Tensor&)>& of) const;

  // The sums of one wgrad: what `add` has to write, and the partial sum to start from, undefined for zero.
  class Sums {
   public:
    Sums(const Gradients& gradients, const Execution& pass)
        : gradients_(gradients), in_(pass.gradient_in()), out_(pass.gradient_out()) {}

    bool wants(int parameter) const { return gradients_.wants(parameter); }
    at::Tensor out(int parameter) const { return out_[gradients_.index(parameter)]; }
    at::Tensor arrived(int parameter) const { return in_.empty() ? at::Tensor() : in_[gradients_.index(parameter)]; }
    double scale() const { return gradients_.scale(); }

   private:
    const Gradients& gradients_;
    std::vector<at::Tensor> in_, out_;
  };

  // This rank's own, of every parameter; undefined where not wanted.
  std::vector<at::Tensor> result() const;

 private:
  size_t index(int parameter) const { return static_cast<size_t>(place_[static_cast<size_t>(parameter)]); }

  double scale_;
  const RotationOptions& options_;
  std::vector<int> place_;  // of every parameter's gradient among those that travel; -1: not wanted
  std::vector<TensorLayout> layouts_;
  std::vector<at::Tensor> local_;
};

}  // namespace rtp
