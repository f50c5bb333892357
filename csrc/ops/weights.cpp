#include "ops/weights.h"

#include <algorithm>

#include "base/checks.h"

namespace rtp {
namespace {

// Checks this rank's shard of a parameter, and returns it as it travels. A frozen weight, uint8 with the bytes of whole
// groups, travels flat, without those that its last group lacks. One that is stored as codes is returned flat.
at::Tensor travelling_local(const Executor& executor, const RotationOptions& options, const char* what,
                            const at::Tensor& local, const ParameterFacts& parameter) {
  const int rank = executor.rank(), ranks = executor.ranks();
  const std::vector<int64_t> shard = parameter.shard(ranks, rank);
  const at::IntArrayRef expected(shard);
  const bool coded = parameter.codes && executor.sourced();
  if (parameter.frozen || coded) {
    const char* const stored = coded ? "weight in codes" : "frozen weight";
    const int64_t bytes = coded ? parameter.stored_bytes(ranks) : parameter.held_bytes(ranks, rank, 0);
    RTP_CHECK_TYPE(local.scalar_type() == at::kByte, options.name, ": expected a ", stored, " in uint8, got ",
                   local.scalar_type());
    RTP_CHECK_VALUE(local.numel() == bytes && local.is_contiguous(), options.name, ": expected ", bytes,
                    " contiguous bytes of a ", stored, "'s shard of shape ", expected, " on rank ", rank, " of ", ranks,
                    ", got shape ", local.sizes());
  } else {
    RTP_CHECK_VALUE(local.sizes() == expected, options.name, ": expected a ", what, " shard of shape ", expected,
                    " on rank ", rank, " of ", ranks, ", got ", local.sizes());
    RTP_CHECK_VALUE(local.is_contiguous(), options.name, ": expected a contiguous ", what, " shard, got strides ",
                    local.strides(), " for shape ", local.sizes());
  }
  RTP_CHECK_TYPE(local.device() == executor.shard_device(), options.name, ": expected a ", what, " on ",
                 executor.shard_device().str(), ", where the ring has its shards, got ", local.device().str());
  if (coded) return local.view(-1);
  return parameter.frozen ? local.view(-1).narrow(0, 0, block_bytes(*parameter.frozen, product(shard))) : local;
}

// Returns so much of a shard that is stored as codes, as a tensor.
at::Tensor stored_in(const at::Tensor& bytes, int64_t first, at::ScalarType dtype, const std::vector<int64_t>& shape) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, first, product(shape) * element).view(dtype).view(shape);
}

}  // namespace

int Weights::add(ParameterFacts parameter, bool exists, bool needed) {
  if (!exists) return -1;
  const size_t place = count();
  int64_t first = 0;
  for (const int64_t size : parameter.sizes(executor_.ranks())) {
    rows_.push_back({first, size});
    first += size;
  }
  facts_.parameters.push_back(std::move(parameter));
  index_.push_back(-1), scales_.push_back(-1);
  if (needed && facts_.travels(place, pass_)) {
    RTP_ASSERT(place < given_.size(), "a local shard is missing");
    index_.back() = static_cast<int>(local_.size());
    const char* const what = facts_.is_bias(place) ? "bias" : "weight";
    local_.push_back(travelling_local(executor_, rotation_, what, given_[place], facts_.parameters[place]));
    if (facts_.parameters[place].codes) scales_.back() = coded_++;
  }
  return static_cast<int>(place);
}

Rows Weights::rows(int parameter, int owner, Half half, int owners) const {
  const auto place = static_cast<size_t>(parameter);
  const ParameterFacts& facts = facts_.parameters[place];
  const size_t of_owner = place * static_cast<size_t>(executor_.ranks()) + static_cast<size_t>(owner);
  Rows rows = rows_[of_owner];
  for (int more = 1; more < owners; ++more) rows.count += rows_[of_owner + static_cast<size_t>(more)].count;
  if (!chunk_.empty() && facts.dim == 0) {
    const Rows& part = chunk_[static_cast<size_t>(owner)];
    rows = {rows.first + part.first, part.count};
  }
  const Rows part = half_rows(half, rows.count);
  return {rows.first + part.first, part.count};
}

std::vector<Weights::Range> Weights::ranges(int parameter, const Step& step) const {
  std::vector<Range> ranges;
  int64_t place = 0;
  for (const Step& part : step.ranges(executor_.ranks())) {
    const Rows rows = this->rows(parameter, part);
    if (rows.count > 0) ranges.push_back({place, rows.first, rows.count});
    place += rows.count;
  }
  return ranges;
}

bool Weights::cut_alike(int parameter, int other) const {
  for (int owner = 0; owner < executor_.ranks(); ++owner) {
    if (rows(parameter, owner).count != rows(other, owner).count) return false;
  }
  return true;
}

Rows Weights::first_rows(int parameter, int owner) const {
  const ParameterFacts& facts = facts_.parameters[static_cast<size_t>(parameter)];
  if (facts.dim == 0) return rows(parameter, owner);
  return chunk_.empty() ? Rows{0, facts.shape[0]} : chunk_[static_cast<size_t>(owner)];
}

TensorLayout Weights::layout(int parameter, at::ScalarType dtype) const {
  const ParameterFacts& facts = facts_.parameters[static_cast<size_t>(parameter)];
  TensorLayout layout{dtype, {}, TravelFormat::plain, facts.frozen};
  for (int owner = 0; owner < executor_.ranks(); ++owner) {
    layout.shapes.push_back(facts.shape);
    layout.shapes.back()[0] = first_rows(parameter, owner).count;
    layout.shapes.back()[facts.dim] = rows(parameter, owner).count;
    if (turned(static_cast<size_t>(parameter))) std::swap(layout.shapes.back()[0], layout.shapes.back()[1]);
  }
  return layout;
}

std::optional<ShardBundle> Weights::bundle() const {
  if (local_.empty()) return std::nullopt;
  std::vector<TensorLayout> layouts;
  std::vector<at::Tensor> local;
  bool turns = false;
  for (size_t place = 0; place < count(); ++place) {
    if (index_[place] < 0) continue;
    layouts.push_back(layout(static_cast<int>(place), rotation_.compute_dtype));
    const at::Tensor& own = local_[static_cast<size_t>(index_[place])];
    turns = turns || turned(place);
    local.push_back(turned(place) ? own.t() : chunk(own));
  }
  ShardBundle bundle = travelling_weights(executor_, rotation_, std::move(layouts), std::move(local), facts_.kind.dims);
  bundle.turned = turns;
  if (coded_ > 0) encode(bundle);
  return bundle;
}

// Replaces weights by their codes, which the owner makes here or has stored, and adds their scales.
void Weights::encode(ShardBundle& bundle) const {
  const bool stored = executor_.sourced();
  RTP_CHECK_VALUE(stored || executor_.streams().capture() == 0, rotation_.name,
                  ": expected no capture of a CUDA graph, which would repeat the codes of its first pass");
  for (size_t place = 0; place < count(); ++place) {
    if (scales_[place] < 0) continue;
    const ParameterFacts& facts = facts_.parameters[place];
    const CodePlane& plane = facts.plane(pass_);
    TensorLayout of_codes{at::kByte, {}}, of_scales{scale_dtype(plane), {}};
    for (int owner = 0; owner < executor_.ranks(); ++owner) {
      const std::vector<int64_t> shard = facts.shard(executor_.ranks(), owner);
      const auto [outputs, inputs] = facts.matrix(shard);
      for (auto& [layout, extents] : {std::pair(&of_codes, plane.code_memory(outputs, inputs)),
                                      std::pair(&of_scales, plane.scale_memory(outputs, inputs))}) {
        std::vector<int64_t>& shape = layout->shapes.emplace_back(extents.begin(), extents.end());
        if (shard.size() > 2) shape.insert(shape.begin(), shard[0]);
      }
    }
    const auto index = static_cast<size_t>(index_[place]), rank = static_cast<size_t>(executor_.rank());
    const at::Tensor& local = local_[index];
    CodeMemory memory;
    if (stored) {
      const int64_t first = facts.scales_at(facts.shard(executor_.ranks(), executor_.rank()));
      memory = {stored_in(local, 0, of_codes.dtype, of_codes.shapes[rank]),
                stored_in(local, first, of_scales.dtype, of_scales.shapes[rank])};
    } else {
      const Coding coding{plane, rotation_.compute_dtype, facts.inputs_first};
      std::shared_ptr<ShardCodes> codes = executor_.codes().of(local, coding);
      memory = codes->memory();
      bundle.codes.push_back({std::move(codes), place});
    }
    bundle.layouts[index] = std::move(of_codes), bundle.local[index] = memory.codes;
    bundle.layouts.push_back(std::move(of_scales)), bundle.local.push_back(memory.scales);
  }
  if (!stored) executor_.refresh(bundle);
}

CodeMemory Weights::coded(const std::vector<at::Tensor>& shards, size_t place) const {
  return {shards[static_cast<size_t>(index_[place])], shards[local_.size() + static_cast<size_t>(scales_[place])]};
}

std::vector<Codes> Weights::stacked_codes(const std::vector<at::Tensor>& shards, int parameter) const {
  const auto place = static_cast<size_t>(parameter);
  const ParameterFacts& facts = facts_.parameters[place];
  const auto [outputs, inputs] = facts.matrix(facts.shape);
  const CodeMemory memory = coded(shards, place);
  std::vector<Codes> found;
  for (int64_t matrix = 0; matrix < memory.codes.size(0); ++matrix) {
    found.push_back(codes_in(facts.plane(pass_), memory.of(matrix), outputs, inputs));
  }
  return found;
}

Codes Weights::codes(const std::vector<at::Tensor>& shards, int parameter, const Step& step) const {
  const auto place = static_cast<size_t>(parameter);
  const ParameterFacts& facts = facts_.parameters[place];
  const CodePlane& plane = facts.plane(pass_);
  const CodeMemory memory = coded(shards, place);
  const int64_t count = rows(parameter, step).count;
  if (step.owners == 1 || !plane.single()) return codes_in(plane, memory, count, facts.shape[1]);
  std::vector<Codes> parts;  // each shard has one scale
  int64_t first = 0;
  for (int owner = step.owner; owner < step.owner + step.owners; ++owner) {
    const int64_t of_owner = rows(parameter, owner).count;
    if (of_owner == 0) continue;
    const CodeMemory part{memory.codes.narrow(0, first, of_owner),
                          memory.scales.narrow(0, static_cast<int64_t>(parts.size()), 1)};
    parts.push_back(codes_in(plane, part, of_owner, facts.shape[1]));
    first += of_owner;
  }
  return joined(parts);
}

RotationOptions Weights::options() const {
  RotationOptions options = rotation_;
  if (!chunk_.empty()) {
    options.in_place = false;
    options.late = false;  // a late gradient supports one hop per gradient
  }
  options.late = options.late && facts_.late();
  return options;
}

bool Weights::groups() const {
  const bool plain = !quantizes(rotation_.travel, static_cast<int64_t>(c10::elementSize(rotation_.compute_dtype)));
  return facts_.takes_groups(pass_) && rotation_.route != Route::two_level && (plain || executor_.ranks() == 1) &&
         chunks().count == 1;
}

Chunks Weights::chunks() const {
  const size_t element = std::max(c10::elementSize(rotation_.compute_dtype), c10::elementSize(rotation_.local_dtype()));
  return facts_.chunks(executor_.ranks(), static_cast<int64_t>(element), rotation_.slot_cap);
}

Weights Weights::chunk_of(const Chunks& cut, int64_t chunk) const {
  Weights part = *this;
  for (int owner = 0; owner < executor_.ranks(); ++owner)
    part.chunk_.push_back(cut.of(chunk, first_rows(0, owner).count));
  return part;
}

Gradients::Gradients(Executor& executor, const RotationOptions& rotation, const Weights& weights,
                     const std::vector<bool>& wanted)
    : scale_(1.0 / executor.ranks()), options_(rotation), place_(weights.count(), -1) {
  for (size_t parameter = 0; parameter < weights.count(); ++parameter) {
    if (!wanted[parameter]) continue;
    const TensorLayout layout = weights.layout(static_cast<int>(parameter), rotation.reduce_dtype);
    RTP_CHECK_VALUE(!layout.frozen, rotation.name, ": expected no gradient of a frozen weight");
    place_[parameter] = static_cast<int>(local_.size());
    const at::TensorOptions options = at::TensorOptions().dtype(rotation.local_dtype()).device(executor.device());
    std::vector<int64_t> shape = layout.shapes[static_cast<size_t>(executor.rank())];
    turned_.push_back(weights.turned(parameter));
    if (turned_.back()) std::swap(shape[0], shape[1]);
    const at::Tensor stored = executor.results().empty(shape, options);
    local_.push_back(turned_.back() ? stored.t() : stored);
  }
}

std::optional<ShardBundle> Gradients::bundle(const Weights& weights) const {
  if (!any()) return std::nullopt;
  ShardBundle bundle;
  for (size_t parameter = 0; parameter < place_.size(); ++parameter) {
    if (place_[parameter] < 0) continue;
    bundle.layouts.push_back(weights.layout(static_cast<int>(parameter), options_.reduce_dtype));
    bundle.local.push_back(weights.chunk(local_[static_cast<size_t>(place_[parameter])]));
  }
  return travelling_gradients(std::move(bundle), options_);
}

std::vector<at::Tensor> Gradients::result() const {
  std::vector<at::Tensor> result;
  for (const int parameter : place_) {
    const auto place = static_cast<size_t>(parameter);
    result.push_back(parameter < 0 ? at::Tensor() : turned_[place] ? local_[place].t() : local_[place]);
  }
  return result;
}

}  // namespace rtp
