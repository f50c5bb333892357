// Declarations shared by the files of the extension module _C.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "compute/activation.h"
#include "engine/executor.h"
#include "python/rules.h"

namespace rtp {

// The scope of a native operation: other threads may run Python, and autograd sees the operation only as a whole.
struct OperationScope {
  py::gil_scoped_release release;
  at::AutoDispatchBelowADInplaceOrView below;
};

using ExecutorClass = py::class_<Executor, std::shared_ptr<Executor>>;

// Operations whose weights travel as a bundle: MLPs, vocabulary heads with their loss, experts.
void bind_bundles(py::module_& m);

// Creates the submodule `kernels`: CUDA kernels and the corresponding ATen paths, for tests and benchmarks.
void bind_kernels(py::module_& m);

// The autograd node between a parameter and its local shard.
void bind_delivered(py::module_& m);

// Passes as CUDA graphs.
void bind_graphs(py::module_& m, ExecutorClass& executor);

// The record and the trace of a ring's events, and checksums of its hops.
void bind_sink(py::module_& m, ExecutorClass& executor);

void parse(const std::string& text, Activation& parsed);

}  // namespace rtp

namespace pybind11::detail {

template <>
struct type_caster<rtp::Activation> : text_caster<rtp::Activation> {};

}  // namespace pybind11::detail
