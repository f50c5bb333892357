// Operands that lie side by side in memory as one operand of a product.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace rtp {

// Returns the parts as one tensor along `dim`: a view where they lie one after the other in memory, else undefined.
at::Tensor joined_view(const std::vector<at::Tensor>& parts, int64_t dim);
// Returns the parts as one tensor along dimension 0: a view where they lie one after the other in memory, else a copy.
at::Tensor joined_rows(const std::vector<at::Tensor>& parts);
// Returns biases of so many `rows` each, as above; undefined ones are zeros. Undefined if all are.
at::Tensor joined_biases(std::vector<at::Tensor> parts, const std::vector<at::Tensor>& weights);

// product(out, in) adds as gemm() does, to the rows of all outs and ins; all or none of `ins` are defined. It is
// computed apart from those that do not lie one after the other.
void add_joined(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                const std::function<void(const at::Tensor& out, const at::Tensor& in)>& product);
// outs[i] = ins[i] + alpha * lefts[i].T @ right; all or none of `ins` are defined. One product if `joined`, where lefts
// lie side by side; it is computed apart from outs and ins that do not.
void add_products(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                  const std::vector<at::Tensor>& lefts, const at::Tensor& right, double alpha, bool joined);

// Returns whether one product a shard costs less memory traffic than one for every weight that multiplies the same
// operand [tokens, features]. Separate products read it `repeats` times more, or read and write a sum of its size; that
// makes `passes` over memory of so many numbers. Joined ones copy `columns` columns of results or of their gradients,
// which are separate tensors, and `rows` rows of weights or gradients that do not lie side by side. It depends on
// shapes alone, never on addresses: a shard at home and one that travels must give the same bits.
inline bool joins(int64_t repeats, int64_t passes, int64_t tokens, int64_t features, int64_t columns, int64_t rows) {
  return repeats * passes * tokens * features > 2 * (columns * tokens + rows * features);
}

// The results of several weights with one input, or their gradients, side by side in one matrix: the columns of one
// product are adjacent.
class JoinedColumns {
 public:
  explicit JoinedColumns(size_t results) : blocks_(results) {}

  // Assigns the next `count` columns of the matrix to the next columns of a result.
  void add(size_t result, int64_t count);
  void allocate(int64_t rows, const at::TensorOptions& options) { matrix_ = at::empty({rows, columns_}, options); }
  int64_t columns() const { return columns_; }

  // Returns columns of a result that were added at once, or some of them.
  at::Tensor of(size_t result, int64_t column, int64_t count) const;
  void copy_from(size_t result, const at::Tensor& tensor) const;
  void copy_to(size_t result, const at::Tensor& tensor) const;

 private:
  struct Block {
    int64_t column, place, count;  // first column in the result and in the matrix, number of columns
  };
  // Calls copy(view of `tensor`, view of the matrix) for blocks at equal distances, [rows, blocks, columns].
  template <typename Copy>
  void each_run(size_t result, const at::Tensor& tensor, Copy&& copy) const;

  std::vector<std::vector<Block>> blocks_;  // by result, in the order of its columns
  int64_t columns_ = 0;
  at::Tensor matrix_;
};

}  // namespace rtp
