// Shared by all rotated operations: options, shard layouts, schedules and gradients.
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
  at::ScalarType compute_dtype = at::kFloat;  // dtype of computes; weights are cast to it before they travel
  at::ScalarType reduce_dtype = at::kFloat;   // dtype in which partial gradients travel
  int64_t slot_cap = 0;                       // maximum bytes of a slot; larger shards travel in chunks. 0: no limit
  bool halves = false;                        // gradients of single linear layers travel in two halves
  bool deferred = false;                      // a backward may end before the last gradient hop has arrived
  std::string name;                           // name of the module or function, for messages
  Wire wire = Wire::plain;                    // travel format of weights, if it has fewer bits than the compute dtype
  GradientRoute gradient_route = GradientRoute::chain;  // direct is unsupported on routes gather and two_level
  bool gradients_quantized = false;  // gradient route direct only: gradients travel in 8 bits, with block scales

  // The dtype in which the owner sums gradients. A sum that travels is rounded at every rank anyway.
  at::ScalarType local_dtype() const;
  bool rounded() const { return gradients_quantized || local_dtype() != reduce_dtype; }
};

// Returns the first row of every owner's shard.
std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes);

// The rows of every owner's shard that travel in one pass; a shard above the slot cap takes several passes. Chunks are
// cut along the rows of a shard, so that each is contiguous.
struct Chunk {
  std::vector<int64_t> offsets;  // first row in the shard of each owner
  std::vector<int64_t> sizes;
  bool single = true;  // the shard has no other chunk

  // Returns this chunk of the shard of `owner` (or of its gradient), or of several shards.
  at::Tensor of(const at::Tensor& shard, int owner) const {
    return single ? shard : shard.narrow(0, offsets[owner], sizes[owner]);
  }
  std::vector<at::Tensor> of(std::vector<at::Tensor> shards, int owner) const {
    for (at::Tensor& shard : shards) shard = of(shard, owner);
    return shards;
  }
};

// `rows`: rows of every owner's shard. `row_elements`: elements that travel per row; their size is that of the wider of
// the dtypes of weights and gradients. Returns at least one chunk.
std::vector<Chunk> chunks_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements);

// Returns the options for one chunk. Chunks travel out of place, because the local shards of two ranks are cut
// differently, and are not gathered, because chunks exist to use less memory than a whole shard.
RotationOptions chunked(const RotationOptions& options, const Chunk& chunk);

// Returns a layout whose dimension `dim` is cut: its shapes have `sizes[owner]` there and `shape` elsewhere.
TensorLayout cut_layout(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim,
                        const std::vector<int64_t>& sizes);

// Returns the bundle of weights: layouts in the compute dtype and the local tensors. In a ring of several ranks,
// tensors with at least `dims` dimensions travel in options.wire; biases, which have fewer, in the compute dtype.
ShardBundle travelling_weights(const Executor& executor, const RotationOptions& options,
                               std::vector<TensorLayout> layouts, std::vector<at::Tensor> local, size_t dims = 2);

// Checks that `local` is this rank's contiguous shard of `layout`.
void check_local(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& local,
                 const TensorLayout& layout);

// Checks this rank's shard of a parameter, and returns it as it travels. A frozen weight, uint8 with the bytes of whole
// groups (the fewest rows of `layout` that fill whole blocks), travels flat, without those that its last group lacks.
at::Tensor travelling_local(const Executor& executor, const RotationOptions& options, const char* what,
                            const at::Tensor& local, const TensorLayout& layout);

// Return the schedule of a pass over `weights`, in place if requested and supported: see Travel.
const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const ShardBundle& weights,
                                 bool two_streams = false);

// The gradients that a backward pass computes, whether its weight gradients depend on its input gradients, and the
// schedule features that the operation permits.
struct BackwardNeeds {
  bool dgrad = true;
  bool wgrad = true;
  bool bundle = false;
  bool halves = false;
  bool two_streams = false;
};
const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<ShardBundle>& weights, const BackwardNeeds& needs);

// Returns gradients in their travel format; their local tensors have options.local_dtype().
ShardBundle travelling_gradients(ShardBundle gradients, const RotationOptions& options);

// The gradients of an operation's parameters in its backward.
//
// Records which gradients are needed and their places among those that travel, gives access to the received and
// outgoing partial sums, and holds the scale that turns the sum into a mean. Parameters are identified by their place
// among those of the operation; -1: absent.
class Gradients {
 public:
  // `layouts`: those of all parameters' gradients, whole shards, in the reduce dtype. Allocates this rank's gradients.
  Gradients(Executor& executor, const RotationOptions& options, std::vector<TensorLayout> layouts,
            const std::vector<bool>& wanted);

  bool any() const { return !local_.empty(); }
  bool wants(int parameter) const { return parameter >= 0 && place_[static_cast<size_t>(parameter)] >= 0; }
  double scale() const { return scale_; }  // 1 / ranks

  // Returns the bundle of one pass; nothing if no gradient is needed. For a chunk: `chunk` holds the layouts of all
  // parameters, and `of` returns the chunk of a local gradient.
  std::optional<ShardBundle> bundle() const;
  std::optional<ShardBundle> bundle(const std::vector<TensorLayout>& chunk,
                                    const std::function<at::Tensor(const at::Tensor&)>& of) const;

  // The sums of one wgrad: the tensors to write, and the partial sums to start from, undefined for zero.
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

  // Returns this rank's gradient of every parameter; undefined if not needed.
  std::vector<at::Tensor> result() const;

 private:
  size_t index(int parameter) const { return static_cast<size_t>(place_[static_cast<size_t>(parameter)]); }

  double scale_;
  const RotationOptions& options_;
  std::vector<int> place_;  // by parameter: place of its gradient among those that travel; -1: not needed
  std::vector<TensorLayout> layouts_;
  std::vector<at::Tensor> local_;
};

}  // namespace rtp
