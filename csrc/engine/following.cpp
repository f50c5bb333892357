// Passes whose products one kernel makes, following the hops: see kernels/arriving/arrivals.h.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "base/checks.h"
#include "engine/executor.h"
#include "kernels/arriving/arriving_gemm.h"

namespace rtp {
namespace {

constexpr int64_t kAligned = 16;  // bytes

std::optional<std::string> operand_refusal(const char* what, const at::Tensor& matrix) {
  const auto bytes = static_cast<int64_t>(matrix.element_size());
  if (matrix.size(1) > 1 && matrix.stride(1) != 1) return concat(what, " is not stored row by row");
  const bool rows = matrix.size(0) <= 1 || matrix.stride(0) * bytes % kAligned == 0;
  if (!rows || reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAligned != 0) {
    return concat("rows of ", what, " do not start at multiples of ", kAligned, " bytes");
  }
  return std::nullopt;
}

std::optional<std::string> product_refusal(const FollowedProduct& product) {
  const at::ScalarType dtype = product.left.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return concat("it computes in ", dtype);
  if (product.out.numel() == 0) return "there are no tokens";
  if (product.out.size(1) > 1 && product.out.stride(1) != 1) return "the output is not stored row by row";
  for (const at::Tensor& matrix : {product.left, product.weight, product.out}) {
    if (std::max({matrix.size(0), matrix.size(1), matrix.stride(0)}) > std::numeric_limits<int32_t>::max()) {
      return "a matrix has more than 2^31 rows or columns";
    }
  }
  if (auto reason = operand_refusal("the input", product.left)) return reason;
  return operand_refusal("the weight", product.weight);
}

}  // namespace

// What is known before the pass begins.
struct Execution::FollowPlan {
  ArrivingGemm gemm{};
  at::Tensor counters;
  std::vector<HopWords> hops;  // of every step
  uint64_t* ahead = nullptr;   // to raise once the hop that was sent before the pass has landed
  size_t last = 0;             // compute of the pass

  std::vector<const void*> sums;
  std::vector<int> turns, first_tiles;  // of every sum: products so far, and where its counters begin
  int sum_tiles = 0;

  // Why the kernel cannot make this product; nothing where it can.
  std::optional<std::string> add(const FollowedProduct& product, int position);
};

std::optional<std::string> Execution::FollowPlan::add(const FollowedProduct& product, int position) {
  if (auto reason = product_refusal(product)) return reason;
  if (gemm.products == kMostProducts) return concat("the pass has more than ", kMostProducts, " products");
  gemm.type = product.left.scalar_type() == at::kBFloat16 ? Element::bfloat16 : Element::float16;
  gemm.sums = product.out.scalar_type() == at::kFloat;
  ArrivingProduct& mine = gemm.product[gemm.products++];
  mine.left = product.left.const_data_ptr();
  mine.weight = product.weight.const_data_ptr();
  mine.bias = product.bias.defined() ? product.bias.const_data_ptr() : nullptr;
  mine.out = product.out.data_ptr();
  mine.left_stride = static_cast<int32_t>(product.left.stride(0));
  mine.weight_stride = static_cast<int32_t>(product.weight.stride(0));
  mine.out_stride = static_cast<int32_t>(product.out.stride(0));
  mine.rows = static_cast<int32_t>(product.out.size(0));
  mine.columns = static_cast<int32_t>(product.out.size(1));
  mine.inner = static_cast<int32_t>(product.left.size(1));
  mine.position = position;
  const int tiles = tiles_of(mine.rows, mine.columns);
  gemm.arrivals.tiles[position] += tiles;
  if (!gemm.sums) return std::nullopt;
  size_t sum = 0;
  while (sum < sums.size() && sums[sum] != mine.out) ++sum;
  if (sum == sums.size()) {
    sums.push_back(mine.out);
    turns.push_back(0);
    first_tiles.push_back(sum_tiles);
    sum_tiles += tiles;
  }
  mine.counter = first_tiles[sum];
  mine.turn = turns[sum]++;
  mine.adds = product.adds || mine.turn > 0;
  return std::nullopt;
}

// Why no kernel can follow this pass; nothing where `plan` says how.
std::optional<std::string> Execution::plan_following(const FollowedProducts& products, FollowPlan& plan) const {
  const ScheduleOptions& options = schedule_.options;
  Following* const following = executor_.transport().following();
  if (following == nullptr) return concat("hops over ", executor_.transport().name(), " cannot be followed");
  if (executor_.ranks() == 1) return "there is one rank";
  if (options.in_place) return "shards travel in place";
  if (gradient_[0] && schedule_.hops(Channel::gradient) > 0) return "it makes weight gradients between its products";
  for (const Part& part : weight_->parts) {
    if (part.narrow()) return "weights travel in fewer bits than they are computed with";
  }
  Arrivals& arrivals = plan.gemm.arrivals;
  arrivals.words = following->pass_words();
  plan.hops.resize(schedule_.steps.size());
  const auto bytes = [&](int owner) {
    int64_t total = 0;
    for (const Part& part : weight_->parts) total += part.bytes(owner);
    return total;
  };
  struct Place {        // of a slot
    int landed = -1;    // the hop into it that no compute has waited for yet
    int position = -1;  // that read it last, and that no hop has waited for yet
  };
  std::vector<Place> places(static_cast<size_t>(schedule_.weight_slots));
  int hops = 0, ahead = -1;  // ahead: the hop that was sent before the pass
  for (size_t index = 0; index < schedule_.steps.size(); ++index) {
    const Step& step = schedule_.steps[index];
    if (step.action == Action::hop && step.channel == Channel::weight && !step.receive.is_whole()) {
      Place& place = places[static_cast<size_t>(step.receive.slot)];
      if (hops++ == 0 && ahead_) ahead = static_cast<int>(index);
      if (bytes(step.receive_owner) == 0) continue;
      if (place.position >= 0) {
        const int before = std::exchange(place.position, -1);
        arrivals.frees |= 1u << before;
        plan.hops[index].freed = arrivals.words + kMostPositions + before;
      }
      place.landed = static_cast<int>(index);
      continue;
    }
    if (step.action != Action::compute || step.weight.is_whole()) return concat("route ", name(options.route));
    plan.last = index;
    const auto made = products(step, views(step.weight, step.owner));
    if (made.empty()) continue;
    const int position = arrivals.positions++;
    if (position == kMostPositions) return concat("there are more than ", kMostPositions, " shards");
    for (const FollowedProduct& product : made) {
      if (auto reason = plan.add(product, position)) return reason;
    }
    if (step.weight.is_home()) continue;
    Place& place = places[static_cast<size_t>(step.weight.slot)];
    const int landed = std::exchange(place.landed, -1);
    RTP_ASSERT(landed >= 0, operation_, ": a shard that nobody sent");
    uint64_t* const arrived = arrivals.words + position;
    arrivals.waits |= 1u << position;
    (landed == ahead ? plan.ahead : plan.hops[static_cast<size_t>(landed)].arrived) = arrived;
    place.position = position;
  }
  if (arrivals.positions == 0) return "it has no products";
  arrivals.in_order = plan.gemm.sums;
  const int64_t counted = static_cast<int64_t>(sizeof(ArrivalCounters) / sizeof(unsigned));
  plan.counters = at::zeros({counted + plan.sum_tiles}, at::TensorOptions().dtype(at::kInt).device(executor_.device()));
  auto* const counters = static_cast<unsigned*>(plan.counters.data_ptr());
  arrivals.counters = reinterpret_cast<ArrivalCounters*>(counters);
  plan.gemm.turns = counters + counted;
  return std::nullopt;
}

// All hops of the pass are posted before the kernel is launched: what it waits for is then on its way whatever the host
// does next, be it a launch that returns only when its kernel has ended, or code that the driver loads.
bool Execution::follow(const FollowedProducts& products) {
  if (!executor_.follows()) return false;
  FollowPlan plan;
  const std::optional<std::string> reason = plan_following(products, plan);
  executor_.note_followed(operation_, reason.value_or(""));
  if (reason) return false;
  guarded([&] {
    executor_.check_alive(operation_);
    Following& following = *executor_.transport().following();
    Lanes& lanes = executor_.lanes();
    Trace& trace = executor_.trace_;
    if (plan.ahead != nullptr) following.announce(Channel::weight, plan.ahead);
    hop_words_ = &plan.hops;
    while (position_ < schedule_.steps.size()) {
      const Step& step = schedule_.steps[position_++];
      if (step.action == Action::hop) hop(step);
    }
    hop_words_ = nullptr;
    position_ = plan.last + 1;
    const Step& last = schedule_.steps[plan.last];
    computing_ = trace.begin_compute(traced_, position(), last, recorded_);
    following.launch(plan.gemm);
    trace.end_compute(std::exchange(computing_, nullptr), recorded_);
    const Mark mark = lanes.mark_compute();
    for (size_t index = 0; index < schedule_.steps.size(); ++index) {
      if (schedule_.steps[index].action != Action::compute) continue;
      for (const Access& access : schedule_.accesses[index].reads) usage(access).enter_read(mark);
    }
    send_ahead();  // ordered after the kernel, which reads all slots
    position_ = schedule_.steps.size();
    end();
  });
  return true;
}

void Executor::set_follows(bool follows) {
  Following* const following = transport_->following();
  RTP_CHECK_VALUE(!follows || following != nullptr,
                  "persistent_gemm: expected a transport whose hops a kernel can follow"
                  ", which is ce, got ",
                  transport_->name());
  if (follows) or_fail([&] { following->load(); });
  follows_ = follows;
  followed_.clear();
}

}  // namespace rtp
