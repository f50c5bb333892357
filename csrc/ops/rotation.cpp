#include "ops/rotation.h"

#include <algorithm>
#include <cmath>

#include "base/checks.h"

namespace rtp {
namespace {

bool moves_in_place(Executor& executor, const RotationOptions& options, const Cargo& weights) {
  const Transport& transport = executor.transport();
  if (!options.in_place || options.route == Route::gather) return false;
  if (!transport.sends_anywhere() || !transport.receives_anywhere()) return false;
  for (size_t part = 0; part < weights.parts.size(); ++part) {
    if (weights.home[part].scalar_type() != weights.parts[part].dtype) return false;
  }
  return true;
}

}  // namespace

std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> starts(sizes.size(), 0);
  for (size_t owner = 1; owner < sizes.size(); ++owner) starts[owner] = starts[owner - 1] + sizes[owner - 1];
  return starts;
}

std::vector<Piece> pieces_of(const RotationOptions& options, const std::vector<int64_t>& rows, int64_t row_elements) {
  const int64_t most = *std::max_element(rows.begin(), rows.end());
  int64_t chunk = std::max<int64_t>(most, 1);
  if (options.slot_cap > 0) {
    const size_t element = std::max(c10::elementSize(options.compute_dtype), c10::elementSize(options.reduce_dtype));
    const int64_t row_bytes = std::max<int64_t>(row_elements * static_cast<int64_t>(element), 1);
    chunk = std::clamp<int64_t>(options.slot_cap / row_bytes, 1, chunk);
  }
  std::vector<Piece> pieces;
  for (int64_t first = 0; first == 0 || first < most; first += chunk) {
    Piece piece;
    for (const int64_t size : rows) {
      piece.offsets.push_back(std::min(first, size));
      piece.sizes.push_back(std::clamp<int64_t>(size - first, 0, chunk));
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

RotationOptions piecewise(const RotationOptions& options, const std::vector<Piece>& pieces) {
  RotationOptions result = options;
  if (pieces.size() > 1) {
    result.in_place = false;
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

bool wastes_last_wave(int64_t rows, int64_t columns, int multiprocessors) {
  constexpr int64_t kTileRows = 128, kTileColumns = 256;  // of the GEMM kernels for large bf16 products on sm_90
  constexpr double kEnough = 0.93;
  if (multiprocessors == 0 || rows == 0 || columns == 0) return false;
  const int64_t tiles = ((rows + kTileRows - 1) / kTileRows) * ((columns + kTileColumns - 1) / kTileColumns);
  const double waves = static_cast<double>(tiles) / multiprocessors;
  return waves / std::ceil(waves) < kEnough;
}

Schedule forward_schedule(Executor& executor, const RotationOptions& options, const Cargo& weights, bool two_lanes) {
  ScheduleOptions schedule;
  schedule.pass = Pass::forward;
  schedule.route = options.route;
  schedule.in_place = moves_in_place(executor, options, weights);
  schedule.two_lanes = two_lanes;
  return make_schedule(executor.ranks(), executor.rank(), schedule);
}

Schedule backward_schedule(Executor& executor, const RotationOptions& options, const std::optional<Cargo>& weights,
                           const BackwardNeeds& needs) {
  ScheduleOptions schedule;
  schedule.pass = Pass::backward;
  schedule.route = options.route;
  schedule.in_place = weights && moves_in_place(executor, options, *weights);
  schedule.dgrad = needs.dgrad;
  schedule.wgrad = needs.wgrad;
  schedule.bundle = needs.bundle;
  schedule.halves = needs.halves;
  schedule.two_lanes = needs.two_lanes;
  schedule.receive_in_slots = !executor.transport().receives_anywhere();
  return make_schedule(executor.ranks(), executor.rank(), schedule);
}

}  // namespace rtp
