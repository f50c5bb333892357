// Shared by all rotated operations: options, shard layouts, schedules and gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/executor.h"
#include "schedule/tile_waves.h"

namespace rtp {

// How an operation rotates, and in which dtypes.
struct RotationOptions {
  Route route = Route::ring;
  int group = 1;  // shards in a product, at most, of operations that take groups
  bool in_place = false;
  at::ScalarType compute_dtype = at::kFloat;  // dtype of computes; weights are cast to it before they travel
  at::ScalarType reduce_dtype = at::kFloat;   // dtype in which partial gradients travel
  int64_t slot_cap = 0;                       // maximum bytes of a slot; larger shards travel in chunks. 0: no limit
  bool halves = false;                        // gradients of linear layers and bundles travel in two halves
  bool late = false;                          // a backward may end before the last gradient hop has arrived
  std::string name;                           // name of the module or function, for messages
  TravelFormat travel = TravelFormat::plain;  // travel format of weights, if it has fewer bits than the compute dtype
  GradientRoute gradient_route = GradientRoute::chain;  // direct is unsupported on route two_level
  bool gradients_quantized = false;  // gradient route direct only: gradients travel in 8 bits, with block scales
  bool gradients_apart = false;      // gradient route direct only: see ScheduleOptions::apart
  bool collective = false;           // of operations that take groups: see ScheduleOptions

  // The dtype in which the owner sums gradients. A sum that travels is rounded at every rank anyway.
  at::ScalarType local_dtype() const;
  bool narrow() const { return gradients_quantized || local_dtype() != reduce_dtype; }
};

// Returns the bundle of weights: layouts in the compute dtype and the local tensors. In a ring of several ranks,
// tensors with at least `dims` dimensions travel in options.travel; biases, which have fewer, in the compute dtype.
ShardBundle travelling_weights(const Executor& executor, const RotationOptions& options,
                               std::vector<TensorLayout> layouts, std::vector<at::Tensor> local, size_t dims = 2);

// The features of a schedule that an operation permits. `groups`: several shards may be one operand.
struct Permits {
  bool two_lanes = false;
  bool groups = false;
};

// Return the schedule of a pass over `weights`, in place if requested and supported: see Movement.
const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const ShardBundle& weights,
                                 const Permits& permits = {});

// Returns the products of a pass with at most `group` shards each, in the order of owners: as `owner` and `owners` of
// steps. `wraps`: see Execution::wrap_groups.
std::vector<Step> products_of(Executor& executor, Pass pass, int group, bool wraps = false);

// The gradients that a backward pass computes, whether its weight gradients depend on its input gradients, and what the
// operation permits.
struct BackwardNeeds {
  bool dgrad = true;
  bool wgrad = true;
  bool bundle = false;
  bool halves = false;  // it computes halves of gradients, and they are to travel so
  Permits permits = {};
};
const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<ShardBundle>& weights, const BackwardNeeds& needs);

// Returns gradients in their travel format; their local tensors have options.local_dtype().
ShardBundle travelling_gradients(ShardBundle gradients, const RotationOptions& options);

}  // namespace rtp
