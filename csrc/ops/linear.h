// Linear layers whose weight and bias shards visit every rank.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "ops/weights.h"

namespace rtp {

inline constexpr OperationKind kLinear = operation_kind("linear");

// A layer y = x @ W.T + b with W [out_features, in_features], stored that way or transposed. The bias is always cut
// along its only dimension.
struct LinearShape {
  int64_t out_features = 0;
  int64_t in_features = 0;
  bool by_outputs = true;   // W is cut along its output features, else along its input features
  bool transposed = false;  // W is stored as [in_features, out_features]
  // W is stored in blocks, [out_features, in_features]; see base/blocks.h. Cut by outputs, a local shard is uint8
  // [groups, bytes]: a group is the fewest rows that fill whole blocks, or, in an MLP, a block's count of rows; the
  // last group may lack rows. Cut by inputs, of which there are whole blocks, it is uint8 [out_features, blocks,
  // bytes].
  std::optional<BlockFormat> frozen = std::nullopt;
  bool in_mlp = false;
  std::optional<CodePlanes> codes = std::nullopt;  // W travels in 8 bits, cut by outputs
};

ParameterFacts weight_facts(const LinearShape& shape);

// Returns a stored weight, or a shard of it, as [out_features, in_features]; an undefined tensor stays undefined.
inline at::Tensor outputs_first(const at::Tensor& stored, const LinearShape& shape) {
  return shape.transposed && stored.defined() ? stored.t() : stored;
}

// Add left.T @ right to the gradient of a stored weight, and the sum of the rows of `values` to that of a bias, if they
// are needed.
void add_weight_gradient(const Gradients::Sums& sums, int parameter, const LinearShape& shape, const at::Tensor& left,
                         const at::Tensor& right);
void add_bias_gradient(const Gradients::Sums& sums, int parameter, const at::Tensor& values);

// Return what joins() asks for: the passes over memory that one more product of a sum makes, and the rows that a pass
// copies because the weights, or gradients, of a shard do not lie side by side: its own shard, or all shards where the
// tensors of a slot have gaps. Both in numbers of the compute dtype. `dtype`: of the weights or gradients.
int64_t sum_passes(at::ScalarType dtype);
int64_t copied_rows(const Executor& executor, const Weights& weights, const std::vector<int>& places, int64_t features,
                    at::ScalarType dtype, const RotationOptions& options);

// Checks that `tensor` is [M, features] in the compute dtype on the device of the ring.
void check_operand(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& tensor,
                   int64_t features);

// A layer cut along its input features: partial outputs are summed, and backward fills dx slice by slice. x [M,
// in_features] in options.compute_dtype; weight and bias are local shards of any floating dtype. Returns y [M,
// out_features] in options.compute_dtype.
at::Tensor partial_linear_forward(Executor& executor, const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const LinearShape& shape,
                                  const RotationOptions& options);

// The gradients of a linear layer to compute.
struct LinearNeeds {
  bool x = true;
  bool weight = true;
  bool bias = false;
};

// dy [M, out_features] and x in options.compute_dtype. Returns dx in options.compute_dtype and this rank's shards of
// the weight and bias gradients, averaged over the ring, in options.reduce_dtype; undefined if not needed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> partial_linear_backward(Executor& executor, const at::Tensor& dy,
                                                                       const at::Tensor& x, const at::Tensor& weight,
                                                                       const LinearShape& shape,
                                                                       const LinearNeeds& needs,
                                                                       const RotationOptions& options);

// Layers cut along their output features that travel together.
struct LinearBundle {
  std::vector<LinearShape> shapes;
  std::vector<bool> biased;
};

// One product of a bundle: rows [begin, end) of the weight `layer`, applied to the input `input`. The products of one
// weight cover each of its rows once.
struct Projection {
  int64_t input = 0;
  int64_t layer = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// inputs [M_i, in_features] in options.compute_dtype; parameters are the local shards of the weights, each followed by
// its bias if it has one. Returns one y [M_i, end - begin] for each projection, in options.compute_dtype.
std::vector<at::Tensor> linear_forward(Executor& executor, const std::vector<at::Tensor>& inputs,
                                       const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                       const std::vector<Projection>& projections, const RotationOptions& options);

// dys: one per projection, undefined if nothing depends on its output. Returns the gradients of the inputs in
// options.compute_dtype, then those of the parameters (this rank's shards, averaged over the ring) in
// options.reduce_dtype; undefined if not needed.
std::vector<at::Tensor> linear_backward(Executor& executor, const std::vector<at::Tensor>& dys,
                                        const std::vector<at::Tensor>& inputs,
                                        const std::vector<at::Tensor>& parameters, const LinearBundle& bundle,
                                        const std::vector<Projection>& projections,
                                        const std::vector<bool>& needs_input, const std::vector<bool>& needs_parameter,
                                        const RotationOptions& options);

}  // namespace rtp
