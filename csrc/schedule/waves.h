// How the output tiles of a matrix product fill a device: wave after wave of one tile for each multiprocessor.
// Source: NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantization).
#pragma once

#include <cstdint>

namespace rtp {

// Rows and columns of an output tile.
struct Tile {
  int64_t rows, columns;
};
// Those that GEMM libraries choose among; the first is that of large bf16 products on sm_90.
inline constexpr Tile kTiles[] = {{128, 256}, {128, 128}};

// Waves that `batch` products [rows, columns] take, the last one in part.
double waves(int64_t rows, int64_t columns, int multiprocessors, const Tile& tile = kTiles[0], int64_t batch = 1);

// The part of the waves, the last counted whole, that has work. 1 where there is none.
double wave_efficiency(int64_t rows, int64_t columns, int multiprocessors);

// Whether a product leaves so much of the device idle in its last wave that two of them had better run side by side.
// `multiprocessors`: 0 means a CPU, which has no waves.
bool wastes_last_wave(int64_t rows, int64_t columns, int multiprocessors);

}  // namespace rtp
