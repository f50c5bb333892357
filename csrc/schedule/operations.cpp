#include "schedule/operations.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checks.h"
#include "base/quantized.h"

namespace rtp {
int64_t product(const std::vector<int64_t>& shape, size_t from) {
  return std::accumulate(shape.begin() + static_cast<int64_t>(from), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t shard_size(int64_t extent, int ranks, int owner) {
  RTP_CHECK_VALUE(extent >= 0 && ranks >= 1, "shard_sizes: expected extent >= 0 and ranks >= 1, got ", extent, " and ",
                  ranks);
  const int64_t chunk = (extent + ranks - 1) / ranks;
  return std::clamp<int64_t>(extent - owner * chunk, 0, chunk);
}

std::vector<int64_t> shard_sizes(int64_t extent, int ranks) {
  std::vector<int64_t> sizes{shard_size(extent, ranks, 0)};
  for (int owner = 1; owner < ranks; ++owner) sizes.push_back(shard_size(extent, ranks, owner));
  return sizes;
}

Rows half_rows(Half half, int64_t rows) {
  const int64_t first = (rows + 1) / 2;
  if (half == Half::whole) return {0, rows};
  return half == Half::first ? Rows{0, first} : Rows{first, rows - first};
}

Rows Chunks::of(int64_t chunk, int64_t shard_rows) const {
  const int64_t first = std::min(chunk * rows, shard_rows);
  return {first, std::min(shard_rows - first, rows)};
}

Chunks cut_in_chunks(int64_t most, int64_t row_bytes, int64_t cap) {
  int64_t rows = std::max<int64_t>(most, 1);
  if (cap > 0) rows = std::clamp<int64_t>(cap / std::max<int64_t>(row_bytes, 1), 1, rows);
  return {rows, std::max<int64_t>((most + rows - 1) / rows, 1)};
}

bool quantizes(TravelFormat travel, int64_t compute_bytes) {
  return travel == TravelFormat::int8 || (travel == TravelFormat::bfloat16 && compute_bytes > 2);
}

int64_t travel_bytes(int64_t numbers, TravelFormat travel, int64_t compute_bytes) {
  if (!quantizes(travel, compute_bytes)) return numbers * compute_bytes;
  return travel == TravelFormat::int8 ? quantized_bytes(numbers) : numbers * 2;
}

int64_t ParameterFacts::rows_of_group() const {
  if (group > 0 || !frozen) return std::max<int64_t>(group, 1);
  return dim == 0 ? rows_of_blocks(*frozen, product(shape, 1)) : block_layout(*frozen).numbers;
}

std::vector<int64_t> ParameterFacts::sizes(int ranks) const {
  if (shape.empty()) return std::vector<int64_t>(static_cast<size_t>(ranks), 1);
  const int64_t rows = rows_of_group();
  int64_t left = shape[static_cast<size_t>(dim)];
  std::vector<int64_t> sizes = shard_sizes((left + rows - 1) / rows, ranks);
  for (int64_t& size : sizes) left -= size = std::min(size * rows, left);
  return sizes;
}

std::vector<int64_t> ParameterFacts::shard(int ranks, int owner) const {
  std::vector<int64_t> shard = shape;
  if (!shard.empty()) shard[dim] = sizes(ranks)[static_cast<size_t>(owner)];
  return shard;
}

int64_t ParameterFacts::held_bytes(int ranks, int owner, int64_t element_bytes) const {
  std::vector<int64_t> held = shard(ranks, owner);
  const int64_t rows = rows_of_group();
  if (frozen) held[dim] = (held[dim] + rows - 1) / rows * rows;
  return travelling_bytes(product(held), frozen, TravelFormat::plain, element_bytes);
}

Extents ParameterFacts::matrix(const std::vector<int64_t>& shard) const {
  const size_t last = shard.size() - 1;
  return inputs_first ? Extents{shard[last], shard[last - 1]} : Extents{shard[last - 1], shard[last]};
}

int64_t ParameterFacts::coded_bytes(Pass pass, const std::vector<int64_t>& shard) const {
  const auto [outputs, inputs] = matrix(shard);
  return stacked(shard) * plane(pass).bytes(outputs, inputs);
}

std::vector<int64_t> ParameterFacts::pulled_bytes(int ranks, int owner, int64_t element_bytes) const {
  const std::vector<int64_t> shard = this->shard(ranks, owner);
  if (!codes) return {travelling_bytes(product(shard), frozen, TravelFormat::plain, element_bytes)};
  return {product(shard), coded_bytes(Pass::forward, shard) - product(shard)};
}

int64_t ParameterFacts::scales_at(const std::vector<int64_t>& shard) const {
  constexpr int64_t kUnit = 64;  // bytes
  return product(shard) / kUnit * kUnit + kUnit;
}

int64_t ParameterFacts::stored_bytes(int ranks) const {
  int64_t most = 0;
  for (int owner = 0; owner < ranks; ++owner) {
    const std::vector<int64_t> shard = this->shard(ranks, owner);
    most = std::max(most, scales_at(shard) + std::max<int64_t>(coded_bytes(Pass::forward, shard) - product(shard), 1));
  }
  return most;
}

bool OperationFacts::late() const {
  return kind.late && std::none_of(parameters.begin(), parameters.end(),
                                   [](const ParameterFacts& each) { return each.frozen.has_value(); });
}

bool OperationFacts::takes_groups(Pass pass) const {
  return kind.groups && std::none_of(parameters.begin(), parameters.end(), [&](const ParameterFacts& each) {
           const bool apart = each.codes && each.shape.size() == 2;  // matrices of a stack are multiplied one by one
           return each.frozen || (apart && !each.plane(pass).stacks(pass == Pass::backward));
         });
}

bool OperationFacts::in_codes() const {
  return std::any_of(parameters.begin(), parameters.end(), [](const ParameterFacts& each) { return each.codes; });
}

Chunks OperationFacts::chunks(int ranks, int64_t element_bytes, int64_t cap) const {
  RTP_CHECK_VALUE(!parameters.empty(), "footprint: expected at least one parameter in every operation, got none");
  int64_t row_bytes = 0, most = 1;
  size_t weights = 0;
  for (size_t place = 0; place < parameters.size(); ++place) {
    const ParameterFacts& each = parameters[place];
    const std::vector<int64_t> largest = each.shard(ranks, 0);
    if (place == 0 && !largest.empty()) most = largest[0];
    row_bytes += product(largest, std::min<size_t>(largest.size(), 1)) * element_bytes;
    if (is_bias(place)) continue;
    ++weights;
    if (each.frozen || each.codes || each.dim >= kind.chunked_dims) cap = 0;
  }
  return cut_in_chunks(most, row_bytes, weights == 1 ? cap : 0);
}

}  // namespace rtp
