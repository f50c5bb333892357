// What tests and benchmarks call of our kernels and of the ATen paths beside them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rtp {

// Makes the submodule `kernels`.
void bind_kernels(pybind11::module_& m);

}  // namespace rtp
