#include "engine/hops/trace.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/checks.h"

namespace rtp {
namespace {

constexpr double kNever = std::numeric_limits<double>::quiet_NaN();

// A hop on CPU: records its arrival time, or else the time when the wait for it returned.
class FollowedTransfer : public Transfer {
 public:
  FollowedTransfer(std::unique_ptr<Transfer> inner, EventHandle event)
      : inner_(std::move(inner)), event_(std::move(event)) {
    event_->end = inner_->arrived();
  }
  void wait_received() override {
    inner_->wait_received();
    if (event_->end) return;
    const Moment arrived = inner_->arrived();
    event_->end = arrived ? arrived : host_moment();
  }
  void wait_sent() override { inner_->wait_sent(); }

 private:
  std::unique_ptr<Transfer> inner_;
  EventHandle event_;
};

Lane lane_of(const Step& step) {
  if (step.action == Action::hop && step.outer) {
    return step.channel == Channel::weight ? Lane::outer_weight : Lane::outer_gradient;
  }
  if (step.action == Action::hop) return step.channel == Channel::weight ? Lane::weight : Lane::gradient;
  return step.lane > 0 ? Lane::side : Lane::compute;
}

bool computes(Lane lane) { return lane == Lane::compute || lane == Lane::side; }

}  // namespace

const char* name(Lane lane) {
  constexpr std::array names{"compute", "side", "weight", "gradient", "outer weight", "outer gradient"};
  return names[static_cast<size_t>(lane)];
}

const char* name(TraceKind kind) {
  constexpr std::array names{"step", "wait", "stage"};
  return names[static_cast<size_t>(kind)];
}

void Trace::start() {
  RTP_CHECK_VALUE(!on_, "trace: expected a ring that is not being recorded, got one that is");
  zero_ = transport_->streams().compute_moment();
  host_zero_ = HostClock::now();
  on_host_ = transport_->streams().on_host();
  ++recording_;
  captured_ = 0;
  passes_.clear();
  events_.clear();
  on_ = true;
}

PassHandle Trace::begin_pass(const std::string& operation, const Schedule& schedule) {
  if (!on_) return nullptr;
  if (transport_->streams().capture() != 0) {
    ++captured_;
    return nullptr;
  }
  passes_.push_back(
      std::make_shared<TracePass>(TracePass{recording_, static_cast<int>(passes_.size()), operation, schedule.options,
                                            transport_->streams().compute_moment(), nullptr}));
  return passes_.back();
}

void Trace::end_pass(const PassHandle& pass) {
  if (pass) pass->end = transport_->streams().compute_moment();
}

EventHandle Trace::add(const PassHandle& pass, const std::string& operation, TraceKind kind, int step, Lane lane,
                       const std::string& label) {
  events_.push_back(std::make_shared<TraceEvent>(TraceEvent{pass, operation, step, kind, lane, label, {}, {}}));
  // The start of a hop is set by depart().
  if (computes(lane)) events_.back()->start = transport_->streams().compute_moment();
  return events_.back();
}

EventHandle Trace::begin(const PassHandle& pass, TraceKind kind, int step, Lane lane, const std::string& label) {
  if (!pass || !on_ || pass->recording != recording_) return nullptr;
  return add(pass, pass->operation, kind, step, lane, label);
}

EventHandle Trace::begin(const PassHandle& pass, int position, const Step& step) {
  if (!pass) return nullptr;
  return begin(pass, TraceKind::step, position, lane_of(step), label(step));
}

EventHandle Trace::announce(const std::string& operation, TraceKind kind, int position, const Step& hop) {
  if (!on_ || transport_->streams().capture() != 0) return nullptr;
  return add(nullptr, operation, kind, position, kind == TraceKind::step ? lane_of(hop) : Lane::compute, label(hop));
}

EventHandle Trace::begin_posting(const PassHandle& pass, int position, const EventHandle& hop) {
  if (!pass || !hop || !on_host_) return nullptr;
  return begin(pass, TraceKind::wait, position, Lane::compute, concat("post ", hop->label));
}

EventHandle Trace::begin_slot(const PassHandle& pass, int position, const std::string& what) {
  if (!pass) return nullptr;
  return begin(pass, TraceKind::wait, position, Lane::compute, concat("slot: ", what));
}

EventHandle Trace::begin_outside(const std::string& operation, const std::string& label) {
  if (!on_ || transport_->streams().capture() != 0) return nullptr;
  return add(nullptr, operation, TraceKind::wait, TraceEvent::kNoStep, Lane::compute, label);
}

uint64_t Trace::begin_collective(const std::string& operation) {
  collective_ = begin_outside(operation, concat("collective: ", operation));
  return recorder_.begin_collective(operation);
}

void Trace::end_collective(uint64_t recorded) {
  recorder_.end(recorded);
  end(std::exchange(collective_, nullptr));
}

void Trace::end(const EventHandle& event) {
  if (event) event->end = transport_->streams().compute_moment();
}

void Trace::depart(const EventHandle& event, const Hop& hop) {
  if (!event) return;
  const Moment moment = transport_->moment(hop);
  event->start = moment ? moment : host_moment();
}

std::shared_ptr<Transfer> Trace::follow(const EventHandle& event, const Hop& hop, std::unique_ptr<Transfer> transfer) {
  if (!event) return transfer;
  event->end = transport_->moment(hop);
  if (event->end) return transfer;
  return std::make_shared<FollowedTransfer>(std::move(transfer), event);
}

Trace::Result Trace::read() {
  Result result{std::chrono::duration<double>(host_zero_.time_since_epoch()).count(), captured_, {}, {}};
  const auto at = [this](const Moment& moment) {
    return moment ? transport_->streams().seconds(zero_, moment) : kNever;
  };
  for (const PassHandle& pass : passes_) {
    result.passes.push_back({pass->operation, pass->options, at(pass->start), at(pass->end)});
  }
  std::array<double, 6> arrived{};  // by row: latest arrival so far
  for (const EventHandle& event : events_) {
    if (!event->start || !event->end) continue;
    const int pass = event->pass ? event->pass->number : -1;
    const double posted = at(event->start);
    double start = posted;
    const double end = std::max(at(event->end), posted);  // small messages may arrive before their hop is posted
    if (!computes(event->lane)) {
      double& before = arrived[static_cast<size_t>(event->lane)];
      start = std::min(std::max(start, before), end);
      before = std::max(before, end);
    }
    result.events.push_back(
        {pass, event->operation, event->step, event->kind, event->lane, event->label, start, end, posted});
  }
  passes_.clear();
  events_.clear();
  return result;
}

}  // namespace rtp
