#include "ops/rotation.h"

#include <algorithm>

#include "base/checks.h"
#include "compute/gemm/gemm.h"

namespace rtp {
namespace {

// The options of a pass that both directions have.
ScheduleOptions schedule_options(Executor& executor, const RotationOptions& options, Pass pass,
                                 const ShardBundle* weights, const Permits& permits) {
  ScheduleOptions schedule;
  schedule.pass = pass;
  schedule.route = !permits.groups && options.route == Route::gather ? Route::direct : options.route;
  schedule.group = permits.groups ? options.group : 1;
  schedule.in_place = options.in_place && options.route != Route::gather && schedule.group == 1 && weights != nullptr &&
                      executor.movement(*weights).in_place();
  schedule.two_lanes = permits.two_lanes;
  schedule.collective = options.collective && permits.groups && executor.ranks() > 1;
  RTP_CHECK_VALUE(!schedule.collective || executor.transport().has_collectives(), options.name,
                  ": expected a transport with collectives, got ", executor.transport().name());
  return schedule;
}

}  // namespace

at::ScalarType RotationOptions::local_dtype() const {
  return gradient_route == GradientRoute::direct ? accumulation_dtype(reduce_dtype) : reduce_dtype;
}

ShardBundle travelling_weights(const Executor& executor, const RotationOptions& options,
                               std::vector<TensorLayout> layouts, std::vector<at::Tensor> local, size_t dims) {
  if (executor.ranks() > 1) {
    for (TensorLayout& layout : layouts) {
      if (layout.shapes.front().size() < dims || layout.frozen) continue;
      layout.travel = options.travel;
    }
  }
  ShardBundle bundle;
  bundle.layouts = std::move(layouts), bundle.local = std::move(local);
  return bundle;
}

const Schedule& forward_schedule(Executor& executor, const RotationOptions& options, const ShardBundle& weights,
                                 const Permits& permits) {
  return executor.schedule(schedule_options(executor, options, Pass::forward, &weights, permits));
}

std::vector<Step> products_of(Executor& executor, Pass pass, int group, bool wraps) {
  std::vector<Step> products;
  if (group == 1) {
    for (Step step; static_cast<int>(products.size()) < executor.ranks(); products.push_back(step)) ++step.owner;
    return products;
  }
  const Compute kind = pass == Pass::forward ? Compute::forward : Compute::dgrad;
  for (const Step& step : executor.schedule({.pass = pass, .group = group}).steps) {
    if (step.action != Action::compute || step.compute != kind) continue;
    if (wraps) products.push_back(step);
    for (int index = 0; !wraps && index < step.products(executor.ranks()); ++index) {
      products.push_back(step.product(index, executor.ranks()));
    }
  }
  std::sort(products.begin(), products.end(), [](const Step& a, const Step& b) { return a.owner < b.owner; });
  return products;
}

const Schedule& backward_schedule(Executor& executor, const RotationOptions& options,
                                  const std::optional<ShardBundle>& weights, const BackwardNeeds& needs) {
  RTP_CHECK_VALUE(
      options.gradient_route == GradientRoute::chain ? !options.gradients_quantized : options.route != Route::two_level,
      options.name, ": expected gradient route chain on route ", rtp::name(options.route),
      ", and direct to quantize gradients, got ", rtp::name(options.gradient_route));
  ScheduleOptions schedule =
      schedule_options(executor, options, Pass::backward, weights ? &*weights : nullptr, needs.permits);
  schedule.dgrad = needs.dgrad;
  schedule.wgrad = needs.wgrad;
  schedule.bundle = needs.bundle;
  schedule.halves = needs.halves || (needs.bundle && options.halves);
  schedule.late = options.late;
  schedule.receive_in_slots = !executor.transport().receives_anywhere();
  schedule.gradient_route = options.gradient_route;
  schedule.narrow = options.narrow();
  schedule.apart = options.gradients_apart;
  return executor.schedule(schedule);
}

ShardBundle travelling_gradients(ShardBundle gradients, const RotationOptions& options) {
  for (size_t index = 0; index < gradients.layouts.size(); ++index) {
    RTP_CHECK_TYPE(gradients.local[index].scalar_type() == options.local_dtype(), options.name,
                   ": expected a gradient of dtype ", options.local_dtype(), ", got ",
                   gradients.local[index].scalar_type());
    gradients.layouts[index].dtype = options.reduce_dtype;
    if (options.gradients_quantized) gradients.layouts[index].travel = TravelFormat::int8;
  }
  return gradients;
}

}  // namespace rtp
