// Stands in for torch's header of this name where the CUDA runtime is simulated.
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

namespace c10::cuda {

DeviceIndex ExchangeDevice(DeviceIndex device);
cudaError_t MaybeSetDevice(DeviceIndex device);

}  // namespace c10::cuda
