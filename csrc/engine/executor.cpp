#include "engine/executor.h"

#include <algorithm>
#include <limits>

#include "base/checks.h"
#include "base/ranges.h"

namespace rtp {

Executor::Executor(std::shared_ptr<Transport> transport, int rank, int ranks, at::Device device, int hosts)
    : transport_(std::move(transport)),
      owner_(getpid()),
      rank_(rank),
      ranks_(ranks),
      device_(device),
      hosts_(hosts),
      pool_(transport_, device),
      sink_(transport_),
      hops_(transport_, sink_),
      prefetcher_({transport_, pool_, hops_, sink_, rank}),
      late_(transport_, pool_, sink_),
      pulls_(pool_) {}

Executor::~Executor() {
  if (!alive()) return;
  late_.empty() ? transport_->drop() : transport_->abort("dropped while a gradient was in flight");
}

const Schedule& Executor::schedule(ScheduleOptions options) {
  if (options.route == Route::two_level) options.hosts = hosts_;
  if (const ShardSource* source = pulls_.source()) {
    options.sourced = true;
    options.hosts = source->hosts();
  }
  const auto found = schedules_.find(options);
  if (found != schedules_.end()) return found->second;
  return schedules_.emplace(options, make_schedule(ranks_, rank_, options)).first->second;
}

void Executor::check_alive(const std::string& operation) const {
  if (forked()) {
    throw RotationError(concat(operation, ": the ring belongs to process ", owner_, "; process ", getpid(),
                               " was forked from it and is no rank of the ring"));
  }
  if (!alive()) throw RotationError(concat(operation, ": the ring cannot be used any more: ", end_));
}

const std::string& Executor::fail(const std::string& reason) noexcept {
  if (!alive()) return sink_.note();
  streams().abandon_graph_stream();  // a capture forbids the stream queries that abort() makes
  end_ = reason.empty() ? "unknown failure" : reason;
  transport_->abort(end_);
  prefetcher_.forget(), late_.forget();
  return sink_.fail(end_);
}

void Executor::close() {
  if (!alive()) return;
  transport_->expect_no_graphs();
  clear_slots();
  end_ = "it was closed";
  transport_->close();
}

void Executor::land(const at::Tensor& gradient) {
  check_alive("a gradient");
  or_fail([&] { late_.finish(gradient); });
}

void Executor::set_trace(bool on) {
  if (alive()) drain();
  on ? sink_.start_trace() : sink_.stop_trace();
}

Execution::Execution(Executor& executor, const Schedule& schedule, std::optional<ShardBundle> weight,
                     std::optional<ShardBundle> gradient, std::string operation)
    : executor_(executor), schedule_(schedule), gradient_(std::move(gradient)), operation_(std::move(operation)) {
  executor_.check_alive(operation_);
  range_.begin([&] { return operation_; });
  for (auto* bundle : {&weight, &gradient_}) {
    if (!*bundle) continue;
    const size_t layouts = (*bundle)->layouts.size(), most = executor_.transport().most_tensors();
    RTP_CHECK_VALUE(layouts <= most, operation_, ": expected at most ", most, " tensors that travel together, got ",
                    layouts);
    // Aliases outside autograd: weights that travel in place are restored before they can be read, so their version
    // must not change.
    for (at::Tensor& local : (*bundle)->local) local = local.variable_data();
  }
  Streams& streams = executor_.streams();
  guarded([&] {
    streams_pass_.emplace(streams);
    const int channels = (schedule_.hops(Channel::weight) > 0) + (schedule_.hops(Channel::gradient) > 0);
    const int taken = executor_.transport().multiprocessors() * channels;
    carveout_.emplace(std::min(taken, streams.multiprocessors() / 2));
    streams.order_compute_after(executor_.last_);
    Sink& sink = executor_.sink_;
    begun_ = sink.begin_pass(operation_, schedule_);
    const int64_t slot = schedule_.gradient_slots.empty() ? 0 : this->gradient().slot_bytes();
    weights_ = executor_.prefetcher_.begin(schedule_, std::move(weight), slot, operation_);
    weights_->begin(begun_, schedule_);
    const EventHandle waiting = sink.begin(begun_, TraceKind::wait, TraceEvent::kNoStep, Lane::compute, "start");
    try {
      lease_slots();
      sink.end(waiting);
      weights_->stage();
    } catch (...) {
      return_slots();
      throw;
    }
    // Local tensors were written, and slots last used, by computes enqueued before this point.
    start_ = streams.record_compute();
    for (const Channel channel : {Channel::weight, Channel::gradient}) {
      if (schedule_.hops(channel) > 0) executor_.transport().order_hops_after(channel, start_);
    }
  });
}

void Execution::lease_slots() {
  SlotPool& pool = executor_.pool();
  if (schedule_.options.narrow) {
    quantizer_.emplace(pool, executor_.streams(), gradient(), schedule_.options.group);
  }
  const bool halved = schedule_.options.halves;
  for (const int shards : schedule_.gradient_slots) {
    slots_.push_back(pool.lease(Channel::gradient, gradient().slot_bytes(shards, halved)));
    // The parts of a slot are followed one by one in this pass, but not those of earlier passes.
    if (shards > 1 || halved) slots_.back()->usage.wait_for_all(executor_.streams());
  }
}

void Execution::return_slots() {
  quantizer_.reset();
  if (weights_) weights_->give_back();
  dequantized_.give_back(executor_.pool());
  sourced_.give_back(executor_.pulls());
  for (auto& slot : std::exchange(slots_, {})) executor_.pool().give_back(Channel::gradient, std::move(slot));
}

Execution::~Execution() {
  try {
    finish();
  } catch (...) {  // the ring is marked as failed, and the original error is being propagated
  }
}

const ShardBundle& Execution::gradient() const {
  RTP_ASSERT(gradient_.has_value(), operation_, " moves a gradient that it was not given");
  return *gradient_;
}

Usage& Execution::usage(const Access& access) {
  const Buffer& buffer = access.buffer;
  if (buffer.channel == Channel::weight) return weights_->usage(access);
  if (!buffer.is_home() && !buffer.has_parts()) return slot(buffer)->usage;
  return usage_[{buffer.slot, access.place, access.half}];
}

std::vector<Usage*> Execution::usages(const std::vector<Access>& accesses) {
  std::vector<Usage*> usages;
  for (const Access& access : accesses) usages.push_back(&usage(access));
  return usages;
}

std::vector<at::Tensor> Execution::views(Buffer buffer, int owner, Half half, int owners) const {
  std::vector<at::Tensor> views;
  if (!buffer.exists()) return views;
  const ShardBundle& bundle = gradient();
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    if (buffer.is_home()) {
      views.push_back(half_of(bundle.local_view(owner, executor_.rank(), index), half));
    } else if (buffer.halves == Halves::apart) {
      views.push_back(bundle.half_in_slot(slot(buffer)->memory, owner, half, index));
    } else {
      const Place place = place_of(schedule_, buffer, owner, owners);
      views.push_back(half_of(bundle.in_slot(slot(buffer)->memory, place, index), half));
    }
  }
  return views;
}

std::vector<at::Tensor> Execution::pieces(Buffer buffer, int owner, Half half) const {
  if (!buffer.halved() || half != Half::whole) return views(buffer, owner, half);
  std::vector<at::Tensor> pieces = views(buffer, owner, Half::first);
  for (at::Tensor& second : views(buffer, owner, Half::second)) pieces.push_back(std::move(second));
  return pieces;
}

std::vector<at::Tensor> Execution::weight() {
  Sink& sink = executor_.sink_;
  const auto& bundle = weights_->bundle();
  std::vector<at::Tensor> arrived;
  if (schedule_.options.sourced) {
    const bool pulled = sourced_.waits(executor_.pulls(), *current_);
    sink.before_product(
        pulled ? computing_ : EventHandle(), TraceKind::wait, [&] { return "wait: " + label(*current_); },
        [&] { arrived = sourced_.of(executor_.pulls(), schedule_, *bundle, schedule_.steps[position_ - 1]); });
  } else {
    arrived = weights_->views(current_->weight, current_->owner, current_->owners);
  }
  const bool converts = dequantized_.converts(bundle, *current_);
  sink.before_product(
      converts ? computing_ : EventHandle(), TraceKind::stage, [] { return "dequantize"; },
      [&] { arrived = dequantized_.of(executor_.pool(), bundle, std::move(arrived), *current_); });
  return arrived;
}
std::vector<at::Tensor> Execution::gradient_in() const {
  return views(current_->gradient_in, current_->owner, current_->half, current_->owners);
}
std::vector<at::Tensor> Execution::gradient_out() const {
  const Buffer out = current_->gradient_out;
  if (quantizer_ && !out.is_home())
    return quantizer_->views(place_of(schedule_, out, current_->owner, current_->owners));
  return views(out, current_->owner, current_->half, current_->owners);
}

const Step* Execution::next() {
  return guarded([this]() -> const Step* {
    if (ended_) return nullptr;
    executor_.check_alive(operation_);
    if (products_left_ > 0) {
      const Step& step = schedule_.steps[position_ - 1];
      product_ = step.product(step.products(executor_.ranks()) - products_left_--, executor_.ranks());
      return current_;
    }
    if (current_ != nullptr) after_compute(schedule_.steps[position_ - 1]);
    current_ = nullptr;
    while (position_ < schedule_.steps.size()) {
      const Step& step = schedule_.steps[position_++];
      if (step.action != Action::compute && step.channel == Channel::weight) {
        executor_.prefetcher_.make(*weights_, begun_, position());
        weights_->end_step(position());
      } else if (step.travels()) {
        hop(step);
      } else if (schedule_.ends_late() && position_ == schedule_.steps.size()) {
        leave_late(step);
      } else if (step.action == Action::copy || step.action == Action::add) {
        copy_or_add(step);
      } else {
        executor_.prefetcher_.look_ahead(*weights_, begun_, position());
        before_compute(step);
        product_ = wraps_ ? step : step.product(0, executor_.ranks());
        products_left_ = wraps_ ? 0 : step.products(executor_.ranks()) - 1;
        return current_ = &product_;
      }
    }
    end();
    return nullptr;
  });
}

void Execution::finish() {
  const Step* step = current_;
  while (!ended_) {
    // A sum that lacks this rank's contribution must not pass for a result at its owner.
    if (step != nullptr && step->gradient_out.exists()) {
      for (at::Tensor& sum : gradient_out()) {
        if (sum.is_floating_point()) sum.fill_(std::numeric_limits<double>::quiet_NaN());
      }
    }
    step = next();
  }
}

void Execution::before_compute(const Step& step) {
  Streams& streams = executor_.streams();
  streams.select_compute_stream(step.lane);
  if (step.lane > 0) streams.order_compute_after(start_);
  Sink& sink = executor_.sink_;
  const Lane lane = step.lane > 0 ? Lane::side : Lane::compute;
  EventHandle waiting;
  const auto after_hop = [&](const auto& transfer, End end) {
    if (begun_ && !waiting) waiting = sink.begin(begun_, TraceKind::wait, position(), lane, "wait: " + label(step));
    const Range range([&] { return concat(operation_, ": wait: ", label(step)); });
    wait(*transfer, end);
  };
  const auto after_compute = [&](const StreamEvent& event) {
    if (schedule_.options.two_lanes) streams.order_compute_after(event);  // computes of one stream are in order
  };
  for (const Access& access : accesses().reads) usage(access).before_read(after_hop, after_compute);
  for (const Access& access : accesses().writes) usage(access).before_write(after_hop, after_compute);
  sink.end(waiting);
  computing_ = sink.begin_compute(begun_, position(), step);
  compute_range_.begin([&] { return concat(operation_, ": ", label(step)); });
}

void Execution::after_compute(const Step& step) {
  const bool leaves = step.action == Action::compute && step.compute == Compute::wgrad && !step.gradient_out.is_home();
  Sink& sink = executor_.sink_;
  const Lane lane = computing_ ? computing_->lane : Lane::compute;
  sink.end(std::exchange(computing_, {}));
  if (quantizer_ && leaves) {
    const EventHandle rounding = sink.begin(begun_, TraceKind::stage, position(), lane, "round");
    for (int each = 0; each < step.owners; ++each) {
      const int owner = (step.owner + each) % executor_.ranks();
      quantizer_->round(views(step.gradient_out, owner), place_of(schedule_, step.gradient_out, owner));
    }
    sink.end(rounding);
  }
  compute_range_.end();
  Streams& streams = executor_.streams();
  const StreamEvent event = streams.record_compute();
  for (const Access& access : accesses().reads) usage(access).record_read(event);
  for (const Access& access : accesses().writes) usage(access).record_write(event);
  weights_->end_step(position());
  if (step.lane > 0) side_ = event;
  streams.select_compute_stream(0);
}

void Execution::hop(const Step& step) {
  Hop hop = hop_of(schedule_, step, operation_, gradient_hops_++);
  if (is_collective(step.action)) {
    set_collective_memory(hop, schedule_, gradient(), slot(step.send)->memory);
  } else {
    const auto send = views(step.send, step.send_owner, step.half);
    const auto receive = views(step.receive, step.receive_owner, step.half);
    set_memory(hop, schedule_, step, gradient(), send, receive);
    hop.send_slot = step.send.is_home() ? nullptr : slot(step.send)->data();
    hop.receive_slot = step.receive.is_home() ? nullptr : slot(step.receive)->data();
  }
  const Range range([&] { return concat(operation_, ": ", label(step)); });
  executor_.hops().post(hop, usages(accesses().reads), usages(accesses().writes),
                        executor_.sink_.begin(begun_, position(), step), begun_, position());
}

std::vector<std::vector<at::Tensor>> Execution::arrivals(const Step& step) const {
  std::vector<std::vector<at::Tensor>> arrivals;
  for (int each = 0; each < step.count; ++each) {
    arrivals.push_back(pieces(step.arrival(each), step.send_owner, step.half));
  }
  return arrivals;
}

void Execution::copy_or_add(const Step& step) {
  before_compute(step);
  // The own contribution of a group goes home before it is rounded.
  const bool own = step.send.is_group() && step.send.at == Buffer::kAnywhere;
  const bool wide = quantizer_ && step.action == Action::copy && own;
  auto from = arrivals(step);
  if (wide) from = {quantizer_->views(place_of(schedule_, step.send, step.send_owner))};
  auto to = pieces(step.receive, step.receive_owner, step.half);
  dequantize_into(executor_.streams(), std::move(to), std::move(from), step.action == Action::add);
  after_compute(step);
}

// Leaves the last addition, together with the slots that its hop uses, until after the pass.
void Execution::leave_late(const Step& step) {
  auto arriving = arrivals(step);
  auto local = pieces(step.receive, step.receive_owner, step.half);
  std::vector<Usage> uses;
  for (auto& [key, usage] : usage_) {
    if (std::get<0>(key) != Buffer::kHome) uses.push_back(std::exchange(usage, Usage()));
  }
  executor_.late_.add(
      {std::exchange(slots_, {}), std::move(uses), std::move(arriving), std::move(local), begun_, position(), step});
}

// Orders the compute stream after every hop except late ones, so that later work on it can use the local tensors,
// outputs and slots. Tensor lifetimes across streams are settled only here.
void Execution::end() {
  ended_ = true;
  Streams& streams = executor_.streams();
  Sink& sink = executor_.sink_;
  const EventHandle waiting = sink.begin(begun_, TraceKind::wait, TraceEvent::kNoStep, Lane::compute, "end");
  Range range([&] { return concat(operation_, ": wait: end"); });
  weights_->wait_for_home();
  if (executor_.prefetcher_.empty()) executor_.pool().settle(Channel::weight);
  for (auto& [key, usage] : usage_) usage.wait_for_all(streams);
  for (const auto& slot : slots_) slot->usage.wait_for_all(streams);
  range.end();
  sink.end(waiting);
  streams.order_compute_after(side_);
  sink.end(begun_);
  executor_.last_ = streams.record_compute();
  if (weights_->keeps()) executor_.prefetcher_.end(std::move(weights_));
  return_slots();
  executor_.prefetcher_.captured() ? executor_.late_.drain() : executor_.late_.end_pass();
  range_.end();
  carveout_.reset();
  streams_pass_.reset();
}

}  // namespace rtp
