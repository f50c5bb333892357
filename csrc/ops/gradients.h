// The gradients of an operation's parameters in its backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "engine/executor.h"

namespace rtp {

// Which gradients are wanted, where each lies among those that travel, what of it has arrived and what goes out, and
// the scale that makes a mean of the sum. Parameters are named by their place among the operation's; -1: there is none.
class Gradients {
 public:
  // `parts`: of the gradients of all parameters, whole shards. Allocates this rank's own ones.
  Gradients(const Executor& executor, std::vector<Part> parts, const std::vector<bool>& wanted);

  bool any() const { return !home_.empty(); }
  bool wants(int parameter) const { return parameter >= 0 && place_[static_cast<size_t>(parameter)] >= 0; }
  double scale() const { return scale_; }  // 1 / ranks

  // What travels in one pass; nothing where no gradient is wanted. `piece` of the parts of all parameters: what it
  // takes of a home gradient is `of`.
  std::optional<Cargo> cargo() const;
  std::optional<Cargo> cargo(const std::vector<Part>& piece,
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
  std::vector<int> place_;  // of every parameter's gradient among those that travel; -1: not wanted
  std::vector<Part> parts_;
  std::vector<at::Tensor> home_;
};

}  // namespace rtp
