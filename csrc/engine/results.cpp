#include "engine/results.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "base/checks.h"

namespace rtp {

void Results::give(std::vector<at::Tensor> places) {
  clear();
  given_ = std::move(places);
}

void Results::note() {
  clear();
  noting_ = true;
}

void Results::clear() {
  given_.reset();
  noting_ = false;
  requested_.clear();
}

at::Tensor Results::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!given_ && !noting_) return at::empty(sizes, options);
  const size_t index = requested_.size();
  if (given_) {
    RTP_ASSERT(index < given_->size(), "a pass returns more tensors than in its first run");
    const at::Tensor& place = (*given_)[index];
    RTP_ASSERT(place.sizes() == sizes && place.scalar_type() == c10::typeMetaToScalarType(options.dtype()),
               "a pass returns a tensor of another shape or dtype than in its first run");
  }
  requested_.push_back(given_ ? (*given_)[index] : at::empty(sizes, options));
  return requested_.back();
}

at::Tensor Results::of(const at::Tensor& made, at::ScalarType dtype) {
  if (!given_ && !noting_) return made.to(dtype);
  return empty(made.sizes(), made.options().dtype(dtype)).copy_(made);
}

}  // namespace rtp
