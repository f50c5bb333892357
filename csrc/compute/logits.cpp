#include "compute/logits.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>

#include "compute/gemm/gemm_layout.h"
#include "compute/kernel_tensors.h"
#include "kernels/logits.h"

namespace rtp {
namespace {

// Returns the column of every target within the chunk (0 if outside), and a mask of the targets inside.
std::pair<at::Tensor, at::Tensor> locate_targets(const LogitChunk& chunk) {
  at::Tensor index = chunk.targets.sub(chunk.first_column);
  const at::Tensor here =
      index.ge(0).logical_and_(index.lt(chunk.logits.size(1))).logical_and_(chunk.targets.ne(chunk.ignore_index));
  return {index.mul_(here), here};
}

void cap(const LogitChunk& chunk) {
  if (chunk.soft_cap > 0) chunk.logits.div_(chunk.soft_cap).tanh_().mul_(chunk.soft_cap);
}

// The kernels accumulate in float32; float64 sums use ATen.
bool has_kernel(const LogitChunk& chunk, const at::Tensor& sums) {
  return kernels_take(chunk.logits) && sums.scalar_type() == at::kFloat;
}

Logits kernel_logits(const LogitChunk& chunk) {
  return {*element_of(chunk.logits.scalar_type()),
          chunk.logits.size(0),
          chunk.logits.size(1),
          chunk.logits.const_data_ptr(),
          chunk.logits.stride(0),
          chunk.targets.const_data_ptr<int64_t>(),
          chunk.first_column,
          chunk.ignore_index,
          static_cast<float>(chunk.soft_cap)};
}

}  // namespace

void add_logits(const LogitChunk& chunk, const RunningSums& sums) {
  if (has_kernel(chunk, sums.most)) {
    const LogitSums parameters{kernel_logits(chunk), sums.most.data_ptr<float>(), sums.scaled.data_ptr<float>(),
                               sums.hit.data_ptr<float>(),
                               sums.total.defined() ? sums.total.data_ptr<float>() : nullptr};
    launch_on_device_of(chunk.logits, [&](void* stream) { return launch_logit_sums(parameters, stream); });
    return;
  }
  cap(chunk);
  const at::Tensor& z = chunk.logits;
  const auto [index, here] = locate_targets(chunk);
  sums.hit.add_(z.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(here.logical_not(), 0));
  if (sums.total.defined()) sums.total.add_(z.sum(1));
  const at::Tensor higher = at::maximum(sums.most, z.amax(1));
  sums.scaled.mul_(sums.most.sub(higher).exp_()).add_(z.sub_(higher.unsqueeze(1)).exp_().sum(1));
  sums.most.copy_(higher);
}

at::Tensor logit_gradient(const LogitChunk& chunk, const LogitTerms& terms, at::ScalarType dtype) {
  const at::Tensor& z = chunk.logits;
  if (has_kernel(chunk, terms.most) && element_of(dtype)) {
    at::Tensor gradient = z;
    if (dtype != z.scalar_type()) {
      const int64_t stride = aligned_stride(z.size(1), static_cast<int64_t>(c10::elementSize(dtype)));
      gradient = at::empty({z.size(0), stride}, z.options().dtype(dtype)).narrow(1, 0, z.size(1));
    }
    const LogitGradient parameters{kernel_logits(chunk),
                                   *element_of(dtype),
                                   gradient.data_ptr(),
                                   gradient.stride(0),
                                   terms.most.const_data_ptr<float>(),
                                   terms.factor.const_data_ptr<float>(),
                                   terms.upstream.const_data_ptr<float>(),
                                   static_cast<float>(1 - terms.label_smoothing),
                                   static_cast<float>(terms.everywhere),
                                   /*windows=*/0};
    launch_on_device_of(z, [&](void* stream) { return launch_logit_gradient(parameters, stream); });
    return gradient;
  }
  cap(chunk);
  const auto [index, here] = locate_targets(chunk);
  at::Tensor slope;  // derivative of the soft cap
  if (chunk.soft_cap > 0) slope = z.div(chunk.soft_cap).square_().neg_().add_(1);
  z.sub_(terms.most.unsqueeze(1)).exp_().mul_(terms.factor.unsqueeze(1));
  z.scatter_add_(1, index.unsqueeze(1), terms.upstream.mul(here).mul_(terms.label_smoothing - 1).unsqueeze(1));
  if (terms.everywhere > 0) z.sub_(terms.upstream.unsqueeze(1), terms.everywhere);
  if (slope.defined()) z.mul_(slope);
  return z.is_cpu() ? z : z.to(dtype);
}

}  // namespace rtp
