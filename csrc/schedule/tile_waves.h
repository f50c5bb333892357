// Number of waves of a matrix product: its output tiles run in waves of one tile per multiprocessor.
#pragma once

#include <cstdint>

namespace rtp {

// Rows and columns of an output tile.
struct Tile {
  int64_t rows, columns;
};
// Tiles that GEMM libraries choose from; the first is the tile of large bf16 products on sm_90.
inline constexpr Tile kTiles[] = {{128, 256}, {128, 128}};

// Returns the waves of `batch` products [rows, columns]; the last wave counts as a fraction.
double waves(int64_t rows, int64_t columns, int multiprocessors, const Tile& tile = kTiles[0], int64_t batch = 1);

// Returns the busy fraction of all waves, with the last counted as whole; 1 if the product is empty.
double wave_efficiency(int64_t rows, int64_t columns, int multiprocessors);

// Returns whether a product leaves so much of the device idle in its last wave that running two products concurrently
// is faster. `multiprocessors`: 0 for a CPU, which has no waves.
bool wastes_last_wave(int64_t rows, int64_t columns, int multiprocessors);

}  // namespace rtp
