// What the kernels take from GPUs of compute capability 8.0 and newer in PTX: copies into shared memory that run beside
// computes, products of 16 x 8 x 16 of a warp, and words that other GPUs and copy engines see. PTX ISA 9.0: "cp.async",
// "ldmatrix", "mma.m16n8k16", "ld.acquire", "st.release", "atom". Tests bring an emulation.
#pragma once

#include "kernels/common/launch.h"

#if defined(RTP_KERNEL_EMULATION)
#include <emulated_tensor_cores.h>
#else

namespace rtp {

// Copies `bytes` (0 to 16) from `from`, which is aligned to 16, into a chunk of shared memory, and zeros behind them.
// Past the first-level cache, which may hold what lay there before.
template <typename Shared>
__device__ void copy_async(Shared& shared, int chunk, const void* from, int bytes) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&shared[chunk]));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits for this thread's copies, but for those of the `kLast` newest groups.
template <int kLast>
__device__ void await_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kLast) : "memory");
}

// Four matrices of 8 x 8 elements of 16 bits. Lane 8 i + j names the chunk that holds row j of matrix i. Lane l gets
// elements (l / 4, 2 (l % 4)) and the next one of each matrix; transposed, elements (2 (l % 4), l / 4) and below.
template <bool kTransposed, typename Shared>
__device__ void load_matrices(uint32_t (&to)[4], Shared& shared, int chunk) {
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(&shared[chunk]));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

// sum [16, 8] += a [16, 16] b [16, 8] in float32; a in the registers of load_matrices of its quarters (top left, bottom
// left, top right, bottom right), b in two of them transposed (top, bottom).
template <typename T>
__device__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_add<__half>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The `Words` of kernels/arriving/arrivals.h.
struct DeviceWords {
  __device__ uint64_t acquire(const uint64_t* word) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ void release(uint64_t* word, uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;\n" ::"l"(word), "l"(value) : "memory");
  }
  __device__ unsigned look(const unsigned* counter) const {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(counter) : "memory");
    return value;
  }
  __device__ unsigned add(unsigned* counter) const {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
    return before;
  }
  __device__ void set(unsigned* counter, unsigned value) const {
    asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(counter), "r"(value) : "memory");
  }
  __device__ void pause() const { __nanosleep(64); }
};

}  // namespace rtp

#endif
