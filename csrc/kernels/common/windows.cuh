// Vectorized access to rows: 16-byte windows that start at aligned addresses, one window per thread. The first and the
// last window of a row may extend beyond it. Sources with another alignment than the row that defines the windows are
// read in narrower words.
#pragma once

#include "kernels/common/elements.h"
#include "kernels/common/launch.h"

namespace rtp {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void round_to(float& to, float x) { to = x; }
__device__ inline void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ inline void round_to(__half& to, float x) { to = __float2half_rn(x); }

constexpr int kWindowBytes = 16;

// Elements per window: 16 bytes of the narrower of two types.
template <typename A, typename B = A>
constexpr int kWindow = kWindowBytes / static_cast<int>(sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));

__host__ __device__ inline int64_t misalignment(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kWindowBytes);
}

// Returns the number of elements between the preceding 16-byte boundary and `row`: window v starts at element v * width
// - shift.
template <typename T>
__host__ __device__ int64_t shift_of(const T* row) {
  return misalignment(row) / static_cast<int64_t>(sizeof(T));
}

// Returns the maximum number of windows per row, for rows that start at `first` and every `stride` elements.
template <typename T>
int64_t windows_of(const T* first, int64_t stride, int64_t rows, int64_t columns, int width) {
  const bool same_shift = rows <= 1 || stride * static_cast<int64_t>(sizeof(T)) % kWindowBytes == 0;
  const int64_t most_shift = same_shift ? shift_of(first) : kWindowBytes / static_cast<int64_t>(sizeof(T)) - 1;
  return columns == 0 ? 0 : divide_up(columns + most_shift, width);
}

template <typename Word, int kWidth, typename T>
__device__ void load_words(T (&to)[kWidth], const T* from) {
  constexpr int kEach = sizeof(Word) / sizeof(T);
#pragma unroll
  for (int i = 0; i < kWidth; i += kEach) {
    const Word word = *reinterpret_cast<const Word*>(from + i);
    memcpy(to + i, &word, sizeof(Word));
  }
}

template <typename Word, int kWidth, typename T>
__device__ void store_words(T* to, const T (&from)[kWidth]) {
  constexpr int kEach = sizeof(Word) / sizeof(T);
#pragma unroll
  for (int i = 0; i < kWidth; i += kEach) {
    Word word;
    memcpy(&word, from + i, sizeof(Word));
    *reinterpret_cast<Word*>(to + i) = word;
  }
}

// Returns whether [first, first + width) lies in [0, count).
__device__ inline bool is_whole(int64_t first, int width, int64_t count) {
  return first >= 0 && first + width <= count;
}

// Loads elements [first, first + kWidth) of `row`; elements outside [0, count) become `missing`.
template <int kWidth, typename T>
__device__ void load_window(T (&to)[kWidth], const T* row, int64_t first, int64_t count, T missing) {
  if (!is_whole(first, kWidth, count)) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = first + i >= 0 && first + i < count ? row[first + i] : missing;
    return;
  }
  const T* from = row + first;
  const int64_t offset = misalignment(from);
  if (offset == 0) {
    load_words<uint4>(to, from);
  } else if (sizeof(T) < sizeof(uint32_t) && offset % static_cast<int64_t>(sizeof(uint32_t)) == 0) {
    load_words<uint32_t>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = from[i];
  }
}

template <int kWidth, typename T>
__device__ void store_window(T* row, int64_t first, int64_t count, const T (&from)[kWidth]) {
  if (!is_whole(first, kWidth, count)) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (first + i >= 0 && first + i < count) row[first + i] = from[i];
    }
    return;
  }
  T* to = row + first;
  const int64_t offset = misalignment(to);
  if (offset == 0) {
    store_words<uint4>(to, from);
  } else if (sizeof(T) < sizeof(uint32_t) && offset % static_cast<int64_t>(sizeof(uint32_t)) == 0) {
    store_words<uint32_t>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = from[i];
  }
}

// The same with conversion to float32.
template <int kWidth, typename T>
__device__ void load_floats(float (&to)[kWidth], const T* row, int64_t first, int64_t count, float missing = 0.0f) {
  T values[kWidth];
  T absent;
  round_to(absent, missing);
  load_window<kWidth>(values, row, first, count, absent);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = to_float(values[i]);
}

template <int kWidth, typename T>
__device__ void store_floats(T* row, int64_t first, int64_t count, const float (&from)[kWidth]) {
  T values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) round_to(values[i], from[i]);
  store_window<kWidth>(row, first, count, values);
}

// Calls body(row, window) for all windows of all rows, distributed over the threads of a tile_launch.
template <typename Body>
__device__ void for_each_window(int64_t rows, int64_t windows, Body&& body) {
  const int64_t row_step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const int64_t window_step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += row_step) {
    for (int64_t window = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; window < windows;
         window += window_step) {
      body(row, window);
    }
  }
}

}  // namespace rtp
