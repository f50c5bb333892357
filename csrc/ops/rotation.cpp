#include "ops/rotation.h"

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

bool moves_in_place(const Executor& executor, const RotationOptions& options, const Cargo& weights) {
  return options.in_place && options.route != Route::gather && executor.travel(weights).in_place();
}

}  // namespace

at::ScalarType RotationOptions::home_dtype() const {
  return gradient_route == GradientRoute::direct ? accumulation_dtype(reduce_dtype) : reduce_dtype;
}

std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> starts(sizes.size(), 0);
  for (size_t owner = 1; owner < sizes.size(); ++owner) starts[owner] = starts[owner - 1] + sizes[owner - 1];
  return starts;
}

std::vector<Piece> pieces_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements) {
  const size_t element = std::max(c10::elementSize(options.compute_dtype), c10::elementSize(options.home_dtype()));
  const Pieces cut = cut_in_pieces(*std::max_element(rows.begin(), rows.end()),
                                   row_elements * static_cast<int64_t>(element), options.slot_cap);
  std::vector<Piece> pieces(static_cast<size_t>(cut.count));
  for (size_t index = 0; index < pieces.size(); ++index) {
    pieces[index].alone = cut.count == 1;
    for (const int64_t size : rows) {
      const Rows of_owner = cut.of(static_cast<int64_t>(index), size);
      pieces[index].offsets.push_back(of_owner.first);
      pieces[index].sizes.push_back(of_owner.count);
    }
  }
  return pieces;
}

RotationOptions piecewise(const RotationOptions& options, const Piece& piece) {
  RotationOptions result = options;
  if (!piece.alone) {
    result.in_place = false;
    result.late = false;  // one landing for each gradient
    if (result.route == Route::gather) result.route = Route::direct;
  }
  return result;
}

Part cut_part(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim, const std::vector<int64_t>& sizes) {
  Part part{dtype, {}};
  for (const int64_t size : sizes) {
    shape[static_cast<size_t>(dim)] = size;
    part.shapes.push_back(shape);
  }
  return part;
}

Cargo travelling_weights(const Executor& executor, const RotationOptions& options, std::vector<Part> parts,
                         std::vector<at::Tensor> home, size_t dims) {
  if (executor.ranks() > 1) {
    RTP_CHECK_VALUE(options.wire == Wire::plain || options.route != Route::gather, options.name,
                    ": expected weights that travel in the compute dtype on route gather, which computes with all "
                    "shards at once");
    for (Part& part : parts) {
      if (part.shapes.front().size() >= dims) part.wire = options.wire;
    }
  }
  return {std::move(parts), std::move(home)};
}

void check_home(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& home,
                const Part& part) {
  const at::IntArrayRef expected(part.shapes[executor.rank()]);
  RTP_CHECK_VALUE(home.sizes() == expected, options.name, ": expected a ", what, " shard of shape ", expected,
                  " on rank ", executor.rank(), " of ", executor.ranks(), ", got ", home.sizes());
  RTP_CHECK_VALUE(home.is_contiguous(), options.name, ": expected a contiguous ", what, " shard, got strides ",
                  home.strides(), " for shape ", home.sizes());
  RTP_CHECK_TYPE(home.device() == executor.device(), options.name, ": expected a ", what, " on ",
                 executor.device().str(), ", the device of the ring, got ", home.device().str());
}

const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const Cargo& weights,
                                 bool two_lanes) {
  ScheduleOptions schedule;
  schedule.pass = Pass::forward;
  schedule.route = options.route;
  schedule.in_place = moves_in_place(executor, options, weights);
  schedule.two_lanes = two_lanes;
  return executor.schedule(schedule);
}

const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<Cargo>& weights, const BackwardNeeds& needs) {
  RTP_CHECK_VALUE(options.gradient_route == GradientRoute::chain
                      ? !options.gradients_quantised
                      : options.route != Route::gather && options.route != Route::two_level,
                  options.name, ": expected gradient route chain on route ", rtp::name(options.route),
                  ", and direct to quantise gradients, got ", rtp::name(options.gradient_route));
  ScheduleOptions schedule;
  schedule.pass = Pass::backward;
  schedule.route = options.route;
  schedule.in_place = weights && moves_in_place(executor, options, *weights);
  schedule.dgrad = needs.dgrad;
  schedule.wgrad = needs.wgrad;
  schedule.bundle = needs.bundle;
  schedule.halves = needs.halves;
  schedule.late = options.late;
  schedule.two_lanes = needs.two_lanes;
  schedule.receive_in_slots = !executor.transport().receives_anywhere();
  schedule.gradient_route = options.gradient_route;
  schedule.narrow = options.narrow();
  return executor.schedule(schedule);
}

Cargo travelling_gradients(Cargo gradients, const RotationOptions& options) {
  for (size_t part = 0; part < gradients.parts.size(); ++part) {
    RTP_CHECK_TYPE(gradients.home[part].scalar_type() == options.home_dtype(), options.name,
                   ": expected a gradient of dtype ", options.home_dtype(), ", got ",
                   gradients.home[part].scalar_type());
    gradients.parts[part].dtype = options.reduce_dtype;
    if (options.gradients_quantised) gradients.parts[part].wire = Wire::int8;
  }
  return gradients;
}

Gradients::Gradients(Executor& executor, const RotationOptions& rotation, std::vector<Part> parts,
                     const std::vector<bool>& wanted)
    : scale_(1.0 / executor.ranks()), options_(rotation), place_(parts.size(), -1) {
  for (size_t parameter = 0; parameter < parts.size(); ++parameter) {
    if (!wanted[parameter]) continue;
    place_[parameter] = static_cast<int>(parts_.size());
    parts_.push_back(std::move(parts[parameter]));
    const at::TensorOptions options = at::TensorOptions().dtype(rotation.home_dtype()).device(executor.device());
    home_.push_back(executor.results().empty(parts_.back().shapes[static_cast<size_t>(executor.rank())], options));
  }
}

std::optional<Cargo> Gradients::cargo() const {
  if (!any()) return std::nullopt;
  return travelling_gradients({parts_, home_}, options_);
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
  return travelling_gradients(std::move(cargo), options_);
}

std::vector<at::Tensor> Gradients::result() const {
  std::vector<at::Tensor> result;
  for (const int place : place_) result.push_back(place < 0 ? at::Tensor() : home_[static_cast<size_t>(place)]);
  return result;
}

}  // namespace rtp
