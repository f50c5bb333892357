// The subset of CUDA that the kernels use, on a CPU: every thread of a block is a fiber, so that barriers and shuffles
// work, in a deterministic order. Undefined behaviour of a kernel is an error here: races in shared memory, reads of
// unwritten or nonexistent elements of it, barriers and shuffles that not all threads reach. The address sanitizer
// checks addresses outside of arrays.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(most_threads)
#define RTP_SHARED(type, name, count) static emulation::SharedArray<type, count> name(#name)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 gridDim, blockDim, blockIdx, threadIdx;  // values of the running fiber

namespace emulation {

// Undefined behaviour of a kernel. Ends the launch.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Order { forward, backward };  // order in which threads and blocks run
void set_order(Order order);

// Runs a launch. Returns 0, or 1 after a violation; message() returns its text.
int run(dim3 grid, dim3 block, const std::function<void()>& kernel);
const char* message();

// The position of the running fiber.
int thread_index();
int64_t epoch();  // incremented by every barrier and every block

void barrier();
// Publishes `bytes` (at most 8) to the lanes of the same warp, and returns those of lane `source`.
void exchange(const void* give, void* take, size_t bytes, int source);

// An array in shared memory that records the readers and writers of each element, with their epochs.
template <typename T, int kCount>
class SharedArray {
 public:
  explicit SharedArray(const char* name) : name_(name) {}

  class Element {
   public:
    Element(SharedArray& array, int64_t index) : array_(array), index_(index) {}
    operator T() const { return array_.read(index_); }
    void operator=(T value) { array_.write(index_, value); }

   private:
    SharedArray& array_;
    int64_t index_;
  };
  Element operator[](int64_t index) { return Element(*this, index); }

 private:
  struct Cell {
    T value;
    int64_t block = -1;               // launch and block of the last write
    int64_t written = -1, read = -1;  // epochs
    int writer = -1, reader = -1;     // threads; kSeveral: more than one
  };
  static constexpr int kSeveral = -2;

  Cell& cell(int64_t index, const char* what) {
    if (index < 0 || index >= kCount) {
      throw Violation(text(index) + " is " + what + ", but the array has " + std::to_string(kCount) + " elements");
    }
    return cells_[static_cast<size_t>(index)];
  }
  std::string text(int64_t index) const { return name_ + "[" + std::to_string(index) + "]"; }

  T read(int64_t index);
  void write(int64_t index, T value);

  std::string name_;
  std::array<Cell, kCount> cells_;
};

int64_t block_number();  // counts the blocks of all launches

template <typename T, int kCount>
T SharedArray<T, kCount>::read(int64_t index) {
  Cell& it = cell(index, "read");
  if (it.block != block_number()) throw Violation(text(index) + " is read before any thread of its block wrote it");
  if (it.written == epoch() && it.writer != thread_index()) {
    throw Violation(text(index) + " is read by thread " + std::to_string(thread_index()) + " and written by thread " +
                    std::to_string(it.writer) + " with no barrier between");
  }
  it.reader = it.read == epoch() && it.reader != thread_index() ? kSeveral : thread_index();
  it.read = epoch();
  return it.value;
}

template <typename T, int kCount>
void SharedArray<T, kCount>::write(int64_t index, T value) {
  Cell& it = cell(index, "written");
  const bool here = it.block == block_number();
  if (here && it.written == epoch() && it.writer != thread_index()) {
    throw Violation(text(index) + " is written by threads " + std::to_string(it.writer) + " and " +
                    std::to_string(thread_index()) + " with no barrier between");
  }
  if (here && it.read == epoch() && it.reader != thread_index()) {
    throw Violation(text(index) + " is written by thread " + std::to_string(thread_index()) +
                    " and read by another with no barrier between");
  }
  it.value = value;
  it.block = block_number();
  it.written = epoch();
  it.writer = thread_index();
}

// Bits of bfloat16 and float16, rounded to nearest, ties to even.
uint16_t bfloat16_bits(float x);
float bfloat16_value(uint16_t bits);
uint16_t float16_bits(float x);
float float16_value(uint16_t bits);

template <typename T>
T shuffle(T value, int source) {
  T result;
  exchange(&value, &result, sizeof(T), source);
  return result;
}

inline void require_all_lanes(unsigned mask) {
  if (mask != 0xffffffffu) throw Violation("a shuffle with a mask of some lanes is not emulated");
}

}  // namespace emulation

inline void __syncthreads() { emulation::barrier(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int streams) {
  emulation::require_all_lanes(mask);
  return emulation::shuffle(value, emulation::thread_index() % 32 ^ streams);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int streams) {
  emulation::require_all_lanes(mask);
  const int lane = emulation::thread_index() % 32;
  return emulation::shuffle(value, lane + streams < 32 ? lane + streams : lane);
}

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulation::bfloat16_bits(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return emulation::bfloat16_value(x.bits); }
inline __half __float2half_rn(float x) { return {emulation::float16_bits(x)}; }
inline float __half2float(__half x) { return emulation::float16_value(x.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

inline float __fdividef(float a, float b) { return a / b; }

inline void atomicAdd(float* to, float x) { *to += x; }
inline void atomicAdd(__nv_bfloat16* to, __nv_bfloat16 x) {
  *to = __float2bfloat16_rn(__bfloat162float(*to) + __bfloat162float(x));
}
inline void atomicAdd(__half* to, __half x) { *to = __float2half_rn(__half2float(*to) + __half2float(x)); }
inline void atomicAdd(__nv_bfloat162* to, __nv_bfloat162 x) {
  atomicAdd(&to->x, x.x);
  atomicAdd(&to->y, x.y);
}
inline void atomicAdd(__half2* to, __half2 x) {
  atomicAdd(&to->x, x.x);
  atomicAdd(&to->y, x.y);
}
inline void atomicAdd(float4* to, float4 x) {
  atomicAdd(&to->x, x.x);
  atomicAdd(&to->y, x.y);
  atomicAdd(&to->z, x.z);
  atomicAdd(&to->w, x.w);
}
