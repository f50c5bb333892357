// Kernels that wait for hops run as their own source, on emulated threads: on the stream that they were launched on, as
// many blocks one after the other as were launched. In a unit of its own, without CUDA's headers, which declare the
// same types.
#pragma GCC optimize("O2")
#define RTP_KERNEL_EMULATION
#define launch_arriving_gemm run_arriving_gemm
#include "../../../csrc/kernels/arriving/arriving_gemm.cu"
#include "../kernel_emulation/emulated_cuda.cpp"
