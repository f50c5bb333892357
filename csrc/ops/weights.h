// The parameters of an operation and their gradients, as they are cut and as they travel.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/rotation.h"
#include "schedule/operations.h"

namespace rtp {

// The parameters of one pass of an operation, identified by their places in the order of the engine; -1: absent.
class Weights {
 public:
  // `local`: this rank's shards; those that do not travel in this pass may be left out at the end.
  Weights(Executor& executor, const RotationOptions& options, const OperationKind& kind, Pass pass,
          const std::vector<at::Tensor>& local)
      : executor_(executor), rotation_(options), facts_{kind, {}}, pass_(pass), given_(local) {}

  // Adds a parameter, if there is one, and returns its place. Checks its shard if it travels: in a backward, what the
  // kind of operation says, and of that what is `needed`.
  int add(ParameterFacts parameter, bool exists = true, bool needed = true);

  // The rows of the shards of `owners` consecutive owners, or of a half of one, along the dimension that is cut.
  Rows rows(int parameter, int owner, Half half = Half::whole, int owners = 1) const;
  Rows rows(int parameter, const Step& step) const { return rows(parameter, step.owner, step.half, step.owners); }
  // The rows of the shards of a step that are adjacent in the parameter, in the order of a slot: two ranges where the
  // owners of a group wrap around. `place`: the first row in the shards.
  struct Range {
    int64_t place, first, count;
  };
  std::vector<Range> ranges(int parameter, const Step& step) const;
  int64_t extent(int parameter, const Step& step) const {
    const std::vector<Range> ranges = this->ranges(parameter, step);
    return ranges.empty() ? 0 : ranges.back().place + ranges.back().count;
  }
  bool cut_alike(int parameter, int other) const;
  // The part of `tensor`, which has the whole extent along its dimension `dim`, that belongs to the shard of `owner`.
  at::Tensor of(const at::Tensor& tensor, int64_t dim, int parameter, int owner, int owners = 1) const {
    const Rows part = rows(parameter, owner, Half::whole, owners);
    return tensor.narrow(dim, part.first, part.count);
  }
  // The rows along dimension 0, in the whole parameter.
  Rows first_rows(int parameter, int owner) const;

  TensorLayout layout(int parameter, at::ScalarType dtype) const;
  // Returns what travels, nothing if no parameter does, and the place of a parameter in it.
  std::optional<ShardBundle> bundle() const;
  int index(int parameter) const { return index_[static_cast<size_t>(parameter)]; }
  // The shards of a step of a parameter that travels in 8 bits: of a matrix, and of each matrix of a stack.
  Codes codes(const std::vector<at::Tensor>& shards, int parameter, const Step& step) const;
  std::vector<Codes> stacked_codes(const std::vector<at::Tensor>& shards, int parameter) const;

  // Calls body(weights) for the whole shards or, if a single weight exceeds the slot cap, for every chunk of its rows,
  // which is contiguous.
  template <typename Body>
  void each_chunk(Body&& body) const {
    const Chunks cut = chunks();
    for (int64_t chunk = 0; chunk < cut.count; ++chunk) {
      if (cut.count == 1) {
        body(*this);
      } else {
        body(chunk_of(cut, chunk));
      }
    }
  }
  // This chunk of a shard of this rank, or of its gradient.
  at::Tensor chunk(const at::Tensor& local) const {
    return chunk_.empty() ? local : local.narrow(0, own_chunk().first, own_chunk().count);
  }
  // The options of a pass. Chunks travel out of place, because the local shards of two ranks are cut differently.
  RotationOptions options() const;
  // Whether the shards of several owners can be one operand, and how many are, at most. Chunks cannot: their rows are
  // not those of one range.
  bool groups() const;
  int group() const {
    const int ranks = executor_.ranks();
    const int requested = rotation_.route == Route::gather ? ranks : std::min(rotation_.group, ranks);
    return requested > 1 && !executor_.sourced() && groups() ? requested : 1;
  }
  bool grouped() const { return group() > 1; }
  // Whether a weight travels transposed, see OperationFacts::turns. as_stored() returns its shards as they are stored.
  bool turned(size_t parameter) const { return facts_.turns(parameter) && grouped(); }
  at::Tensor as_stored(int parameter, const at::Tensor& shards) const {
    return shards.defined() && turned(static_cast<size_t>(parameter)) ? shards.t() : shards;
  }

  size_t count() const { return facts_.parameters.size(); }

 private:
  void encode(ShardBundle& bundle) const;
  CodeMemory coded(const std::vector<at::Tensor>& shards, size_t place) const;
  Chunks chunks() const;
  Weights chunk_of(const Chunks& cut, int64_t chunk) const;
  const Rows& own_chunk() const { return chunk_[static_cast<size_t>(executor_.rank())]; }

  Executor& executor_;
  const RotationOptions& rotation_;
  OperationFacts facts_;
  Pass pass_;
  const std::vector<at::Tensor>& given_;
  std::vector<Rows> rows_;         // by parameter and owner: the whole shard
  std::vector<Rows> chunk_;        // by owner: the rows of its shard in this chunk; empty: all
  std::vector<int> index_;         // by parameter: its place among those that travel; -1: it does not
  std::vector<int> scales_;        // by parameter: the place of its scales among all scales; -1: it has none
  std::vector<at::Tensor> local_;  // those that travel
  int coded_ = 0;                  // how many of these in 8 bits
};

// The gradients of an operation's parameters in its backward.
//
// Records which gradients are needed and their places among those that travel, gives access to the received and
// outgoing partial sums, and holds the scale that turns the sum into a mean. Parameters are identified by their place
// among those of the operation; -1: absent.
class Gradients {
 public:
  // `wanted`: by parameter of `weights`. Allocates this rank's gradients.
  Gradients(Executor& executor, const RotationOptions& options, const Weights& weights,
            const std::vector<bool>& wanted);

  bool any() const { return !local_.empty(); }
  bool wants(int parameter) const { return parameter >= 0 && place_[static_cast<size_t>(parameter)] >= 0; }
  double scale() const { return scale_; }  // 1 / ranks

  // Returns the bundle of a pass over `weights`, whole shards or a chunk; nothing if no gradient is needed.
  std::optional<ShardBundle> bundle(const Weights& weights) const;

  // The sums of one wgrad: the tensors to write, and the partial sums to start from, undefined for zero.
  class Sums {
   public:
    Sums(const Gradients& gradients, const Execution& pass)
        : gradients_(gradients), in_(pass.gradient_in()), out_(pass.gradient_out()) {}

    bool wants(int parameter) const { return gradients_.wants(parameter); }
    at::Tensor out(int parameter) const { return gradients_.as_stored(parameter, out_); }
    at::Tensor arrived(int parameter) const { return gradients_.as_stored(parameter, in_); }
    double scale() const { return gradients_.scale(); }

   private:
    const Gradients& gradients_;
    std::vector<at::Tensor> in_, out_;
  };

  // Returns this rank's gradient of every parameter, after the pass; undefined if not needed.
  std::vector<at::Tensor> result() const;

 private:
  // One of the tensors of a pass, which are empty where a sum starts from zero.
  at::Tensor as_stored(int parameter, const std::vector<at::Tensor>& travelling) const {
    const auto place = static_cast<size_t>(place_[static_cast<size_t>(parameter)]);
    return travelling.empty() ? at::Tensor() : turned_[place] ? travelling[place].t() : travelling[place];
  }

  double scale_;
  const RotationOptions& options_;
  std::vector<int> place_;  // by parameter: place of its gradient among those that travel; -1: not needed
  std::vector<at::Tensor> local_;
  std::vector<bool> turned_;  // whether it is transposed: it travels and is summed so
};

}  // namespace rtp
