#include "ops/rotation.h"

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

bool moves_in_place(const Executor& executor, const RotationOptions& options, const ShardBundle& weights) {
  return options.in_place && options.route != Route::gather && executor.travel(weights).in_place();
}

}  // namespace

at::ScalarType RotationOptions::local_dtype() const {
  return gradient_route == GradientRoute::direct ? accumulation_dtype(reduce_dtype) : reduce_dtype;
}

std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> starts(sizes.size(), 0);
  for (size_t owner = 1; owner < sizes.size(); ++owner) starts[owner] = starts[owner - 1] + sizes[owner - 1];
  return starts;
}

std::vector<Chunk> chunks_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements) {
  const size_t element = std::max(c10::elementSize(options.compute_dtype), c10::elementSize(options.local_dtype()));
  const Chunks cut = cut_in_chunks(*std::max_element(rows.begin(), rows.end()),
                                   row_elements * static_cast<int64_t>(element), options.slot_cap);
  std::vector<Chunk> chunks(static_cast<size_t>(cut.count));
  for (size_t index = 0; index < chunks.size(); ++index) {
    chunks[index].single = cut.count == 1;
    for (const int64_t size : rows) {
      const Rows of_owner = cut.of(static_cast<int64_t>(index), size);
      chunks[index].offsets.push_back(of_owner.first);
      chunks[index].sizes.push_back(of_owner.count);
    }
  }
  return chunks;
}

RotationOptions chunked(const RotationOptions& options, const Chunk& chunk) {
  RotationOptions result = options;
  if (!chunk.single) {
    result.in_place = false;
    result.deferred = false;  // a deferred reduction supports one hop per gradient
    if (result.route == Route::gather) result.route = Route::direct;
  }
  return result;
}

TensorLayout cut_layout(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim,
                        const std::vector<int64_t>& sizes) {
  TensorLayout layout{dtype, {}};
  for (const int64_t size : sizes) {
    shape[static_cast<size_t>(dim)] = size;
    layout.shapes.push_back(shape);
  }
  return layout;
}

ShardBundle travelling_weights(const Executor& executor, const RotationOptions& options,
                               std::vector<TensorLayout> layouts, std::vector<at::Tensor> local, size_t dims) {
  if (executor.ranks() > 1) {
    RTP_CHECK_VALUE(options.wire == Wire::plain || options.route != Route::gather, options.name,
                    ": expected weights that travel in the compute dtype on route gather, which computes with all "
                    "shards at once");
    for (TensorLayout& layout : layouts) {
      if (layout.shapes.front().size() < dims || layout.frozen) continue;
      layout.wire = options.wire;
    }
  }
  return {std::move(layouts), std::move(local)};
}

void check_local(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& local,
                 const TensorLayout& layout) {
  const at::IntArrayRef expected(layout.shapes[executor.rank()]);
  RTP_CHECK_VALUE(local.sizes() == expected, options.name, ": expected a ", what, " shard of shape ", expected,
                  " on rank ", executor.rank(), " of ", executor.ranks(), ", got ", local.sizes());
  RTP_CHECK_VALUE(local.is_contiguous(), options.name, ": expected a contiguous ", what, " shard, got strides ",
                  local.strides(), " for shape ", local.sizes());
  RTP_CHECK_TYPE(local.device() == executor.shard_device(), options.name, ": expected a ", what, " on ",
                 executor.shard_device().str(), ", where the ring has its shards, got ", local.device().str());
}

at::Tensor travelling_local(const Executor& executor, const RotationOptions& options, const char* what,
                            const at::Tensor& local, const TensorLayout& layout) {
  if (!layout.frozen) {
    check_local(executor, options, what, local, layout);
    return local;
  }
  const int rank = executor.rank();
  const int64_t rows = layout.shapes[rank][0];
  const int64_t row_numbers = c10::multiply_integers(layout.shapes[rank].begin() + 1, layout.shapes[rank].end());
  const int64_t group = rows_of_blocks(*layout.frozen, row_numbers);
  const int64_t expected = block_bytes(*layout.frozen, (rows + group - 1) / group * group * row_numbers);
  RTP_CHECK_TYPE(local.scalar_type() == at::kByte, options.name, ": expected a frozen weight in uint8, got ",
                 local.scalar_type());
  RTP_CHECK_VALUE(local.numel() == expected && local.is_contiguous(), options.name, ": expected ", expected,
                  " contiguous bytes of a frozen weight's shard of shape ", at::IntArrayRef(layout.shapes[rank]),
                  " on rank ", rank, " of ", executor.ranks(), ", got shape ", local.sizes());
  RTP_CHECK_TYPE(local.device() == executor.shard_device(), options.name, ": expected a frozen weight on ",
                 executor.shard_device().str(), ", where the ring has its shards, got ", local.device().str());
  return local.view(-1).narrow(0, 0, layout.bytes(rank));
}

const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const ShardBundle& weights,
                                 bool two_streams) {
  ScheduleOptions schedule;
  schedule.pass = Pass::forward;
  schedule.route = options.route;
  schedule.in_place = moves_in_place(executor, options, weights);
  schedule.two_streams = two_streams;
  return executor.schedule(schedule);
}

const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<ShardBundle>& weights, const BackwardNeeds& needs) {
  RTP_CHECK_VALUE(options.gradient_route == GradientRoute::chain
                      ? !options.gradients_quantized
                      : options.route != Route::gather && options.route != Route::two_level,
                  options.name, ": expected gradient route chain on route ", rtp::name(options.route),
                  ", and direct to quantize gradients, got ", rtp::name(options.gradient_route));
  ScheduleOptions schedule;
  schedule.pass = Pass::backward;
  schedule.route = options.route;
  schedule.in_place = weights && moves_in_place(executor, options, *weights);
  schedule.dgrad = needs.dgrad;
  schedule.wgrad = needs.wgrad;
  schedule.bundle = needs.bundle;
  schedule.halves = needs.halves;
  schedule.deferred = options.deferred;
  schedule.two_streams = needs.two_streams;
  schedule.receive_in_slots = !executor.transport().receives_anywhere();
  schedule.gradient_route = options.gradient_route;
  schedule.rounded = options.rounded();
  return executor.schedule(schedule);
}

ShardBundle travelling_gradients(ShardBundle gradients, const RotationOptions& options) {
  for (size_t index = 0; index < gradients.layouts.size(); ++index) {
    RTP_CHECK_TYPE(gradients.local[index].scalar_type() == options.local_dtype(), options.name,
                   ": expected a gradient of dtype ", options.local_dtype(), ", got ",
                   gradients.local[index].scalar_type());
    gradients.layouts[index].dtype = options.reduce_dtype;
    if (options.gradients_quantized) gradients.layouts[index].wire = Wire::int8;
  }
  return gradients;
}

Gradients::Gradients(Executor& executor, const RotationOptions& rotation, std::vector<TensorLayout> layouts,
                     const std::vector<bool>& wanted)
    : scale_(1.0 / executor.ranks()), options_(rotation), place_(layouts.size(), -1) {
  for (size_t parameter = 0; parameter < layouts.size(); ++parameter) {
    if (!wanted[parameter]) continue;
    RTP_CHECK_VALUE(!layouts[parameter].frozen, rotation.name, ": expected no gradient of a frozen weight");
    place_[parameter] = static_cast<int>(layouts_.size());
    layouts_.push_back(std::move(layouts[parameter]));
    const at::TensorOptions options = at::TensorOptions().dtype(rotation.local_dtype()).device(executor.device());
    local_.push_back(executor.results().empty(layouts_.back().shapes[static_cast<size_t>(executor.rank())], options));
  }
}

std::optional<ShardBundle> Gradients::bundle() const {
  if (!any()) return std::nullopt;
  return travelling_gradients({layouts_, local_}, options_);
}

std::optional<ShardBundle> Gradients::bundle(const std::vector<TensorLayout>& chunk,
                                             const std::function<at::Tensor(const at::Tensor&)>& of) const {
  if (!any()) return std::nullopt;
  ShardBundle bundle;
  for (size_t parameter = 0; parameter < place_.size(); ++parameter) {
    if (place_[parameter] < 0) continue;
    bundle.layouts.push_back(chunk[parameter]);
    bundle.local.push_back(of(local_[static_cast<size_t>(place_[parameter])]));
  }
  return travelling_gradients(std::move(bundle), options_);
}

std::vector<at::Tensor> Gradients::result() const {
  std::vector<at::Tensor> result;
  for (const int place : place_) result.push_back(place < 0 ? at::Tensor() : local_[static_cast<size_t>(place)]);
  return result;
}

}  // namespace rtp
