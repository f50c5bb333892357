// Facts of rotated operations: their table, which parameters travel in which pass, how these are cut, and their bytes.
// The engine applies them to tensors, explain and the planner to sizes. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/blocks.h"
#include "base/code_planes.h"
#include "schedule/schedule.h"

namespace rtp {

// Return the rows of one owner's shard, and of all owners' shards, when `extent` rows are cut for `ranks` ranks. Same
// rule as DTensor's Shard: ceil(extent / ranks) rows each, the last shards smaller or empty.
int64_t shard_size(int64_t extent, int ranks, int owner);
std::vector<int64_t> shard_sizes(int64_t extent, int ranks);

// Returns the product of the extents from `from` on.
int64_t product(const std::vector<int64_t>& shape, size_t from = 0);

// A range of rows: the first row and the number of rows.
struct Rows {
  int64_t first, count;
};
Rows half_rows(Half half, int64_t rows);

// The cut of an operation's shards if the largest exceeds the slot cap: `rows` rows per chunk, fewer in the last. There
// is at least one chunk.
struct Chunks {
  int64_t rows, count;

  Rows of(int64_t chunk, int64_t shard_rows) const;
};
// `most`: rows of the largest shard. `row_bytes`: bytes of a row in its travel format. `cap`: in bytes; 0: no limit.
Chunks cut_in_chunks(int64_t most, int64_t row_bytes, int64_t cap);

// travel format of weights
enum class TravelFormat : uint8_t { plain, bfloat16, int8 };

// Return whether a format has fewer bits than a number of `compute_bytes`, and the bytes of `numbers` numbers in it.
// The 8-bit format includes scales: see base/quantized.h.
bool quantizes(TravelFormat travel, int64_t compute_bytes);
int64_t travel_bytes(int64_t numbers, TravelFormat travel, int64_t compute_bytes);
// Returns the bytes of `numbers` numbers that travel, of a parameter that is stored in blocks if `frozen` has a format.
inline int64_t travelling_bytes(int64_t numbers, std::optional<BlockFormat> frozen, TravelFormat travel,
                                int64_t compute_bytes) {
  return frozen ? block_bytes(*frozen, numbers) : travel_bytes(numbers, travel, compute_bytes);
}

// A row of the table of operations.
struct OperationKind {
  std::string_view key;
  bool bundle = false;      // gradients of parameters need results of the gradients of inputs
  bool late = false;        // gradients of parameters may arrive after the pass: no code of it reads them
  bool dgrad = true;        // inputs have gradients, which need the weights
  bool groups = false;      // shards of several owners can be one operand
  bool captured = false;    // CUDA graphs can repeat its passes: their launches follow from shapes alone
  size_t chunked_dims = 0;  // a single weight above the slot cap travels in chunks of rows, if cut along one of these
  size_t dims = 2;          // of a weight; biases have fewer
};

inline constexpr OperationKind kOperations[] = {
    {.key = "linear", .late = true, .groups = true, .captured = true, .chunked_dims = 1},
    {.key = "partial linear", .late = true, .captured = true},
    {.key = "embedding", .dgrad = false, .chunked_dims = 2},
    {.key = "mlp", .bundle = true, .late = true, .groups = true, .captured = true},
    {.key = "linear cross-entropy", .bundle = true, .groups = true, .chunked_dims = 1},
    {.key = "experts", .bundle = true, .groups = true, .dims = 3},
    {.key = "flyweight", .bundle = true},
};

// Returns the row of an operation; one without a row has the usual facts.
constexpr OperationKind operation_kind(std::string_view key) {
  for (const OperationKind& kind : kOperations) {
    if (kind.key == key) return kind;
  }
  return {};
}

// A parameter of whole shape `shape`, which the ring cuts along dimension `dim`. A scalar is not cut.
struct ParameterFacts {
  std::vector<int64_t> shape;
  size_t dim = 0;
  std::optional<BlockFormat> frozen = std::nullopt;  // it is stored, and travels, in blocks
  int64_t group = 0;  // all shards but the last have a multiple of so many rows; 0: as many as fill whole blocks
  bool trained = true;
  // It travels as codes of 8 bits with scales: a matrix [outputs, inputs], or a stack of them that is cut between
  // matrices, each with codes and scales of its own.
  std::optional<CodePlanes> codes = std::nullopt;
  bool inputs_first = false;  // its matrices in 8 bits are stored as [inputs, outputs]

  int64_t rows_of_group() const;
  // The rows along `dim` of every owner's shard, and the shape of one.
  std::vector<int64_t> sizes(int ranks) const;
  std::vector<int64_t> shard(int ranks, int owner) const;
  // Bytes of a shard at rest, where a number that is not in blocks has `element_bytes`. The last group is whole.
  int64_t held_bytes(int ranks, int owner, int64_t element_bytes) const;
  const CodePlane& plane(Pass pass) const { return pass == Pass::forward ? codes->forward : codes->backward; }
  // Outputs and inputs of a matrix in 8 bits of a shard, or of several, and the matrices of a stack; 1: of no stack.
  Extents matrix(const std::vector<int64_t>& shard) const;
  static int64_t stacked(const std::vector<int64_t>& shard) { return shard.size() > 2 ? shard[0] : 1; }
  // Bytes of the codes and scales of a shard.
  int64_t coded_bytes(Pass pass, const std::vector<int64_t>& shard) const;
  // The bytes of the tensors in which a shard is pulled, as it is stored: forward codes and their scales, or one.
  std::vector<int64_t> pulled_bytes(int ranks, int owner, int64_t element_bytes) const;
  // Where the scales begin in a shard that is stored as its forward codes, in bytes, and the bytes of the largest one.
  // Codes have a unit of memory at least, so that the address of scales is another one.
  int64_t scales_at(const std::vector<int64_t>& shard) const;
  int64_t stored_bytes(int ranks) const;
};

// One use of an operation. Parameters have the order of the engine.
struct OperationFacts {
  OperationKind kind;
  std::vector<ParameterFacts> parameters;
  bool input_gradient = true;  // an input requires a gradient

  bool is_bias(size_t parameter) const { return parameters[parameter].shape.size() < kind.dims; }
  // Whether a parameter travels in a pass: in a backward all those of a bundle, else what gradients of inputs need.
  bool travels(size_t parameter, Pass pass) const {
    return pass == Pass::forward || kind.bundle || (kind.dgrad && input_gradient && !is_bias(parameter));
  }
  bool has_gradient(size_t parameter) const { return parameters[parameter].trained && !parameters[parameter].frozen; }
  bool late() const;  // whether its gradients may arrive after the pass
  // Whether the shards of several owners can be one operand of a pass.
  bool takes_groups(Pass pass) const;
  // Whether a parameter travels transposed in groups, so that shards of consecutive owners are adjacent rows.
  bool turns(size_t parameter) const { return parameters[parameter].dim == 1; }
  bool in_codes() const;  // whether a parameter travels in 8 bits
  // `element_bytes`: of the widest number that travels.
  Chunks chunks(int ranks, int64_t element_bytes, int64_t cap) const;
};

}  // namespace rtp
