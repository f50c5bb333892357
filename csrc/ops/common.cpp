#include "ops/common.h"

#include "checks.h"

namespace rtp {
namespace {

// A cast copy travels out of place in any case, and where hops can land in slots only, bringing a shard home takes a
// slot and a copy more: in both cases there is nothing to save by moving the home shard itself.
bool moves_in_place(Executor& executor, const RotationOptions& options, const at::Tensor& home) {
  return options.in_place && home.scalar_type() == options.compute_dtype && executor.transport().receives_anywhere();
}

}  // namespace

std::vector<int64_t> shard_starts(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> starts(sizes.size(), 0);
  for (size_t owner = 1; owner < sizes.size(); ++owner) starts[owner] = starts[owner - 1] + sizes[owner - 1];
  return starts;
}

Part cut_part(at::ScalarType dtype, std::vector<int64_t> shape, int64_t dim, const std::vector<int64_t>& sizes) {
  Part part{dtype, {}};
  for (const int64_t size : sizes) {
    shape[static_cast<size_t>(dim)] = size;
    part.shapes.push_back(shape);
  }
  return part;
}

void check_home(const Executor& executor, const RotationOptions& options, const char* what, const at::Tensor& home,
                const Part& part) {
  const at::IntArrayRef expected(part.shapes[executor.rank()]);
  RTP_CHECK_VALUE(home.sizes() == expected, options.name, ": expected a ", what, " shard of shape ", expected,
                  " on rank ", executor.rank(), " of ", executor.ranks(), ", got ", home.sizes());
  RTP_CHECK_VALUE(home.is_contiguous(), options.name, ": expected a contiguous ", what, " shard, got strides ",
                  home.strides(), " for shape ", home.sizes());
  RTP_CHECK_TYPE(home.device() == executor.device(), options.name, ": expected a ", what, " on ",
                 executor.device().str(), ", the device of the ring, got ", home.device().str());
}

Schedule forward_schedule(Executor& executor, const RotationOptions& options, const at::Tensor& home) {
  ScheduleOptions schedule;
  schedule.pass = Pass::forward;
  schedule.route = options.route;
  schedule.in_place = moves_in_place(executor, options, home);
  return make_schedule(executor.ranks(), executor.rank(), schedule);
}

Schedule backward_schedule(Executor& executor, const RotationOptions& options, const at::Tensor& home, bool dgrad,
                           bool wgrad) {
  ScheduleOptions schedule;
  schedule.pass = Pass::backward;
  schedule.route = options.route;
  schedule.in_place = moves_in_place(executor, options, home);
  schedule.dgrad = dgrad;
  schedule.wgrad = wgrad;
  schedule.receive_in_slots = !executor.transport().receives_anywhere();
  return make_schedule(executor.ranks(), executor.rank(), schedule);
}

}  // namespace rtp
