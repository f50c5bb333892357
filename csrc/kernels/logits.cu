#include "kernels/common/windows.cuh"
#include "kernels/logits.h"

namespace rtp {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kLeastThreads = 128;
constexpr int kGradientThreads = 256;
constexpr float kLowest = -3.402823466e+38f;  // lowest float32; avoids -inf - -inf = NaN

__device__ float capped(float logit, float soft_cap) {
  return soft_cap > 0.0f ? soft_cap * tanhf(logit / soft_cap) : logit;
}

// Returns the column of a row's target in these logits, or -1.
__device__ int64_t target_of(const Logits& logits, int64_t row) {
  const int64_t target = logits.targets[row];
  const int64_t column = target - logits.first_column;
  return target != logits.ignore_index && column >= 0 && column < logits.columns ? column : -1;
}

// Sums over a range of columns.
struct PartialSums {
  float most, scaled, total;

  __device__ void add(const PartialSums& other) {
    const float higher = fmaxf(most, other.most);
    scaled = scaled * expf(most - higher) + other.scaled * expf(other.most - higher);
    most = higher;
    total += other.total;
  }
};

__device__ void add_lanes(PartialSums& sums) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const PartialSums other{__shfl_xor_sync(kAllLanes, sums.most, distance),
                            __shfl_xor_sync(kAllLanes, sums.scaled, distance),
                            __shfl_xor_sync(kAllLanes, sums.total, distance)};
    sums.add(other);
  }
}

// Each block processes one row at a time.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) logit_sums(LogitSums parameters) {
  constexpr int kWidth = kWindow<T>;
  __shared__ float most_of_warp[kWarp];
  __shared__ float scaled_of_warp[kWarp];
  __shared__ float total_of_warp[kWarp];
  const Logits& logits = parameters.logits;
  const int thread = static_cast<int>(threadIdx.x);
  const int warps = static_cast<int>(blockDim.x) / kWarp;

  for (int64_t row = blockIdx.x; row < logits.rows; row += gridDim.x) {
    const T* const values = static_cast<const T*>(logits.values) + row * logits.stride;
    const int64_t shift = shift_of(values);
    const int64_t windows = (logits.columns + shift + kWidth - 1) / kWidth;
    PartialSums sums{kLowest, 0.0f, 0.0f};
    for (int64_t window = thread; window < windows; window += blockDim.x) {
      const int64_t first = window * kWidth - shift;
      float z[kWidth];
      load_floats(z, values, first, logits.columns);
      const int begin = first < 0 ? static_cast<int>(-first) : 0;
      const int end = first + kWidth > logits.columns ? static_cast<int>(logits.columns - first) : kWidth;
      float most = sums.most;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const bool exists = i >= begin && i < end;
        z[i] = exists ? capped(z[i], logits.soft_cap) : -INFINITY;  // its exponential is 0
        sums.total += exists ? z[i] : 0.0f;
        most = fmaxf(most, z[i]);
      }
      float scaled = sums.scaled * expf(sums.most - most);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) scaled += expf(z[i] - most);
      sums.most = most;
      sums.scaled = scaled;
    }

    add_lanes(sums);
    if (thread % kWarp == 0) {
      most_of_warp[thread / kWarp] = sums.most;
      scaled_of_warp[thread / kWarp] = sums.scaled;
      total_of_warp[thread / kWarp] = sums.total;
    }
    __syncthreads();
    if (thread < kWarp) {
      sums = {kLowest, 0.0f, 0.0f};
      if (thread < warps) sums = {most_of_warp[thread], scaled_of_warp[thread], total_of_warp[thread]};
      add_lanes(sums);
      if (thread == 0) {
        PartialSums before{parameters.most[row], parameters.scaled[row], 0.0f};
        before.add(sums);
        parameters.most[row] = before.most;
        parameters.scaled[row] = before.scaled;
        if (parameters.total != nullptr) parameters.total[row] += before.total;
        const int64_t target = target_of(logits, row);
        if (target >= 0) parameters.hit[row] += capped(to_float(values[target]), logits.soft_cap);
      }
    }
    __syncthreads();  // before the warps of the next row write
  }
}

template <typename T, typename Out>
__global__ void logit_gradient(LogitGradient parameters) {
  constexpr int kWidth = kWindow<T, Out>;
  const Logits& logits = parameters.logits;
  for_each_window(logits.rows, parameters.windows, [&](int64_t row, int64_t window) {
    Out* const gradient = static_cast<Out*>(parameters.gradient) + row * parameters.gradient_stride;
    const int64_t first = window * kWidth - shift_of(gradient);
    const int64_t target = target_of(logits, row);
    const int hit = target >= 0 && target >= first && target - first < kWidth ? static_cast<int>(target - first) : -1;
    const float most = parameters.most[row];
    const float factor = parameters.factor[row];
    const float upstream = parameters.upstream[row];
    float z[kWidth];
    load_floats(z, static_cast<const T*>(logits.values) + row * logits.stride, first, logits.columns);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float tanh = logits.soft_cap > 0.0f ? tanhf(z[i] / logits.soft_cap) : 0.0f;
      const float p = expf((logits.soft_cap > 0.0f ? logits.soft_cap * tanh : z[i]) - most);
      float d = p * factor - parameters.everywhere * upstream;
      if (i == hit) d -= parameters.hit_factor * upstream;
      z[i] = d * (1.0f - tanh * tanh);
    }
    store_floats(gradient, first, logits.columns, z);
  });
}

template <typename T>
int launch_sums(const LogitSums& sums, void* stream) {
  const int64_t windows = divide_up(sums.logits.columns, kWindow<T>);
  int threads = kLeastThreads;
  while (threads < kMostThreads && threads * 2 <= windows) threads *= 2;
  return launch(logit_sums<T>, block_launch(sums.logits.rows, threads), stream, sums);
}

template <typename T, typename Out>
int launch_gradient(LogitGradient& gradient, void* stream) {
  const Logits& logits = gradient.logits;
  gradient.windows = windows_of(static_cast<const Out*>(gradient.gradient), gradient.gradient_stride, logits.rows,
                                logits.columns, kWindow<T, Out>);
  return launch(logit_gradient<T, Out>, tile_launch(logits.rows, gradient.windows, kGradientThreads), stream, gradient);
}

}  // namespace

int launch_logit_sums(const LogitSums& sums, void* stream) {
  if (sums.logits.rows == 0 || sums.logits.columns == 0) return 0;
  switch (sums.logits.type) {
    case Element::float32:
      return launch_sums<float>(sums, stream);
    case Element::bfloat16:
      return launch_sums<__nv_bfloat16>(sums, stream);
    default:
      return launch_sums<__half>(sums, stream);
  }
}

int launch_logit_gradient(LogitGradient gradient, void* stream) {
  if (gradient.logits.rows == 0 || gradient.logits.columns == 0) return 0;
  if (gradient.logits.type == Element::bfloat16) return launch_gradient<__nv_bfloat16, __nv_bfloat16>(gradient, stream);
  if (gradient.logits.type == Element::float16) return launch_gradient<__half, __half>(gradient, stream);
  switch (gradient.gradient_type) {
    case Element::float32:
      return launch_gradient<float, float>(gradient, stream);
    case Element::bfloat16:
      return launch_gradient<float, __nv_bfloat16>(gradient, stream);
    default:
      return launch_gradient<float, __half>(gradient, stream);
  }
}

}  // namespace rtp
