#include "schedule/tile_waves.h"

#include <cmath>

namespace rtp {

double waves(int64_t rows, int64_t columns, int multiprocessors, const Tile& tile, int64_t batch) {
  const auto along = [](int64_t extent, int64_t size) { return (extent + size - 1) / size; };
  return static_cast<double>(batch * along(rows, tile.rows) * along(columns, tile.columns)) / multiprocessors;
}

double wave_efficiency(int64_t rows, int64_t columns, int multiprocessors) {
  if (multiprocessors == 0 || rows == 0 || columns == 0) return 1.0;
  const double count = waves(rows, columns, multiprocessors);
  return count / std::ceil(count);
}

bool wastes_last_wave(int64_t rows, int64_t columns, int multiprocessors) {
  constexpr double kEnough = 0.93;
  return wave_efficiency(rows, columns, multiprocessors) < kEnough;
}

}  // namespace rtp
