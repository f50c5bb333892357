#include "ops/gradients.h"

#include <ATen/ops/empty.h>

namespace rtp {

Gradients::Gradients(const Executor& executor, std::vector<Part> parts, const std::vector<bool>& wanted)
    : scale_(1.0 / executor.ranks()), place_(parts.size(), -1) {
  for (size_t parameter = 0; parameter < parts.size(); ++parameter) {
    if (!wanted[parameter]) continue;
    place_[parameter] = static_cast<int>(parts_.size());
    parts_.push_back(std::move(parts[parameter]));
    const at::TensorOptions options = at::TensorOptions().dtype(parts_.back().dtype).device(executor.device());
    home_.push_back(at::empty(parts_.back().shapes[static_cast<size_t>(executor.rank())], options));
  }
}

std::optional<Cargo> Gradients::cargo() const {
  if (!any()) return std::nullopt;
  return Cargo{parts_, home_};
}

std::optional<Cargo> Gradients::cargo(const std::vector<Part>& piece,
                                      const std::function<at::Tensor(const at::Tensor&)>& of) const {
  if (!any()) return std::nullopt;
  Cargo cargo;
  for (size_t parameter = 0; parameter < place_.size(); ++parameter) {
    if (place_[parameter] < 0) continue;
    cargo.parts.push_back(piece[parameter]);
    cargo.home.push_back(of(home_[static_cast<size_t>(place_[parameter])]));
  }
  return cargo;
}

std::vector<at::Tensor> Gradients::result() const {
  std::vector<at::Tensor> result;
  for (const int place : place_) result.push_back(place < 0 ? at::Tensor() : home_[static_cast<size_t>(place)]);
  return result;
}

}  // namespace rtp
