// Stands in for torch's header of this name where cuBLAS is simulated.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

namespace at::cuda {

cublasHandle_t getCurrentCUDABlasHandle();
cublasLtHandle_t getCurrentCUDABlasLtHandle();
size_t getCUDABlasLtWorkspaceSize();
void* getCUDABlasLtWorkspace();

}  // namespace at::cuda
