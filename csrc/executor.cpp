#include "executor.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "checks.h"

namespace rtp {
namespace {

constexpr int64_t kAlignment = 64;  // of a part inside a slot, bytes: a cache line, and any vector load

int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(shape[dim], 1);
  return strides;
}

}  // namespace

int64_t Part::elements(int owner) const {
  const auto& shape = shapes[owner];
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t Part::bytes(int owner) const { return elements(owner) * static_cast<int64_t>(c10::elementSize(dtype)); }

int64_t Cargo::offset(int owner, size_t part) const {
  int64_t offset = 0;
  for (size_t before = 0; before < part; ++before) offset += align(parts[before].bytes(owner));
  return offset;
}

int64_t Cargo::slot_bytes() const {
  int64_t most = 0;
  for (size_t owner = 0; owner < parts.front().shapes.size(); ++owner) {
    most = std::max(most, offset(static_cast<int>(owner), parts.size()));
  }
  return most;
}

at::Tensor SlotPool::lease(Channel channel, int64_t bytes) {
  const size_t kind = static_cast<size_t>(channel);
  auto& free = free_[kind];
  Count& count = counts_[kind];
  std::sort(free.begin(), free.end(), [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  auto found = std::find_if(free.begin(), free.end(), [bytes](const auto& slot) { return slot.numel() >= bytes; });
  if (found == free.end() && !free.empty()) {  // all free slots are too small: the largest makes way for a larger one
    found = free.end() - 1;
    count.bytes -= found->numel();
    --count.slots;
    transport_->release(channel, *found);
    free.erase(found);
    found = free.end();
  }
  at::Tensor slot;
  if (found != free.end()) {
    slot = *found;
    free.erase(found);
  } else {
    slot = transport_->allocate(channel, bytes);
    count.bytes += slot.numel();
    ++count.slots;
    ++count.allocations;
    count.peak_bytes = std::max(count.peak_bytes, count.bytes);
  }
  count.peak_slots = std::max(count.peak_slots, ++leased_[kind]);
  return slot;
}

void SlotPool::give_back(Channel channel, at::Tensor slot) {
  --leased_[static_cast<size_t>(channel)];
  free_[static_cast<size_t>(channel)].push_back(std::move(slot));
}

void SlotPool::clear() {
  for (size_t kind = 0; kind < free_.size(); ++kind) {
    for (const auto& slot : free_[kind]) {
      counts_[kind].bytes -= slot.numel();
      --counts_[kind].slots;
      transport_->release(static_cast<Channel>(kind), slot);
    }
    free_[kind].clear();
  }
}

void SlotPool::reset_peak() {
  for (size_t kind = 0; kind < counts_.size(); ++kind) {
    counts_[kind].peak_slots = leased_[kind];
    counts_[kind].peak_bytes = counts_[kind].bytes;
  }
}

Executor::Executor(std::shared_ptr<Transport> transport, int rank, int ranks, at::Device device)
    : transport_(std::move(transport)), rank_(rank), ranks_(ranks), device_(device), pool_(transport_) {}

Executor::~Executor() {
  if (alive()) transport_->drop();
}

void Executor::check_alive(const std::string& operation) const {
  if (!alive()) throw RotationError(concat(operation, ": the ring cannot be used any more: ", end_));
}

void Executor::fail(const std::string& reason) noexcept {
  if (!alive()) return;
  end_ = reason.empty() ? "unknown failure" : reason;
  transport_->abort(end_);
}

void Executor::close() {
  if (!alive()) return;
  end_ = "it was closed";
  pool_.clear();
  transport_->close();
}

Execution::Execution(Executor& executor, Schedule schedule, std::optional<Cargo> weight, std::optional<Cargo> gradient,
                     std::string operation)
    : executor_(executor),
      schedule_(std::move(schedule)),
      weight_(std::move(weight)),
      gradient_(std::move(gradient)),
      operation_(std::move(operation)) {
  executor_.check_alive(operation_);
  for (auto* cargo : {&weight_, &gradient_}) {
    if (!*cargo) continue;
    // Aliases outside autograd: what travels in place is back before anybody looks, so no version changes.
    for (at::Tensor& home : (*cargo)->home) home = home.variable_data();
  }
  Transport& transport = executor_.transport();
  try {
    lease_slots();
    transport.order_compute_after(executor_.last_);
    stage_home();
  } catch (...) {
    return_slots();
    throw;
  }
  // Home tensors were written, and slots last used, by computes enqueued before this point.
  const Mark start = transport.mark_compute();
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    if (schedule_.hops(channel) > 0) transport.order_channel_after(channel, start);
  }
}

void Execution::lease_slots() {
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    for (int slot = 0; slot < schedule_.slots(channel); ++slot) {
      slots_[static_cast<size_t>(channel)].push_back(executor_.pool().lease(channel, cargo(channel).slot_bytes()));
    }
  }
}

void Execution::return_slots() {
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    auto& slots = slots_[static_cast<size_t>(channel)];
    for (auto& slot : slots) executor_.pool().give_back(channel, std::move(slot));
    slots.clear();
  }
}

void Execution::stage_home() {
  if (!weight_) return;
  const bool travels = schedule_.hops(Channel::weight) > 0;
  const bool from_slots = travels && !executor_.transport().sends_anywhere();
  const auto as_wanted = [&](size_t part) {
    return !from_slots && weight_->home[part].scalar_type() == weight_->parts[part].dtype;
  };
  size_t part = 0;
  while (part < weight_->parts.size() && as_wanted(part)) ++part;
  if (part == weight_->parts.size()) return;
  RTP_ASSERT(!schedule_.options.in_place, operation_, " cannot move a copy in place");
  const at::Tensor slot = executor_.pool().lease(Channel::weight, weight_->slot_bytes());
  slots_[0].push_back(slot);
  staged_ = slot;
  for (part = 0; part < weight_->parts.size(); ++part) {
    const at::Tensor copy = slot_view(slot, *weight_, executor_.rank(), part);
    copy.copy_(weight_->home[part]);
    weight_->home[part] = copy;
  }
}

Execution::~Execution() {
  try {
    finish();
  } catch (...) {  // the ring is marked dead, and the error that led here is already on its way
  }
}

const Cargo& Execution::cargo(Channel channel) const {
  const auto& cargo = channel == Channel::weight ? weight_ : gradient_;
  RTP_ASSERT(cargo.has_value(), operation_, " moves a ", rtp::name(channel), " that it was not given");
  return *cargo;
}

Execution::State& Execution::state(Buffer buffer) { return states_[{buffer.channel, buffer.slot}]; }

at::Tensor Execution::slot_view(const at::Tensor& slot, const Cargo& cargo, int owner, size_t part) const {
  const Part& layout = cargo.parts[part];
  return slot.narrow(0, cargo.offset(owner, part), layout.bytes(owner)).view(layout.dtype).view(layout.shapes[owner]);
}

at::Tensor Execution::view(Buffer buffer, int owner, size_t part) const {
  const Cargo& cargo = this->cargo(buffer.channel);
  if (!buffer.is_home()) {
    return slot_view(slots_[static_cast<size_t>(buffer.channel)][buffer.slot], cargo, owner, part);
  }
  const at::Tensor& home = cargo.home[part];
  if (owner == executor_.rank()) return home;
  const auto& shape = cargo.parts[part].shapes[owner];
  return home.as_strided(shape, contiguous_strides(shape), home.storage_offset());
}

std::vector<at::Tensor> Execution::views(Buffer buffer, int owner) const {
  std::vector<at::Tensor> views;
  if (!buffer.exists()) return views;
  for (size_t part = 0; part < cargo(buffer.channel).parts.size(); ++part) views.push_back(view(buffer, owner, part));
  return views;
}

std::byte* Execution::slot_of(Buffer buffer) const {
  const at::Tensor slot = buffer.is_home() ? (buffer.channel == Channel::weight ? staged_ : at::Tensor())
                                           : slots_[static_cast<size_t>(buffer.channel)][buffer.slot];
  return slot.defined() ? static_cast<std::byte*>(slot.data_ptr()) : nullptr;
}

std::vector<Span> Execution::spans(Buffer buffer, int owner) const {
  std::vector<Span> spans;
  for (const at::Tensor& part : views(buffer, owner)) {
    spans.push_back({static_cast<std::byte*>(part.data_ptr()), static_cast<size_t>(part.nbytes())});
  }
  return spans;
}

std::vector<at::Tensor> Execution::weight() const { return views(current_->weight, current_->owner); }
std::vector<at::Tensor> Execution::gradient_in() const { return views(current_->gradient_in, current_->owner); }
std::vector<at::Tensor> Execution::gradient_out() const { return views(current_->gradient_out, current_->owner); }

// Runs `action`; a transport error kills the ring before it goes on to the caller.
template <typename Action>
auto Execution::guarded(Action&& action) {
  try {
    return action();
  } catch (const RotationError& error) {
    executor_.fail(error.what());
    ended_ = true;
    throw;
  }
}

const Step* Execution::next() {
  return guarded([this]() -> const Step* {
    if (ended_) return nullptr;
    executor_.check_alive(operation_);
    if (current_ != nullptr) after_compute(*current_);
    current_ = nullptr;
    while (position_ < schedule_.steps.size()) {
      const Step& step = schedule_.steps[position_++];
      if (step.action == Action::hop) {
        hop(step);
      } else if (step.action == Action::copy || step.action == Action::add) {
        copy_or_add(step);
      } else {
        before_compute(step);
        current_ = &step;
        return current_;
      }
    }
    end();
    return nullptr;
  });
}

void Execution::finish() {
  const Step* step = current_;
  while (!ended_) {
    // A sum that lacks this rank's part must not pass for a result at its owner.
    if (step != nullptr && step->gradient_out.exists()) {
      for (at::Tensor& sum : gradient_out()) {
        if (sum.is_floating_point()) sum.fill_(std::numeric_limits<double>::quiet_NaN());
      }
    }
    step = next();
  }
}

void Execution::before_compute(const Step& step) {
  for (const Buffer& buffer : {step.weight, step.gradient_in}) {
    if (!buffer.exists()) continue;
    if (const auto& arrived = state(buffer).arrived) arrived->wait_received();
  }
  if (step.gradient_out.exists() && !(step.gradient_out == step.gradient_in)) {
    State& out = state(step.gradient_out);
    if (out.arrived) out.arrived->wait_received();
  }
  if (step.gradient_out.exists()) {
    for (const auto& departing : state(step.gradient_out).departing) departing->wait_sent();
  }
}

void Execution::after_compute(const Step& step) {
  const Mark mark = executor_.transport().mark_compute();
  for (const Buffer& buffer : {step.weight, step.gradient_in}) {
    if (buffer.exists()) state(buffer).read.push_back(mark);
  }
  if (step.gradient_out.exists()) {
    state(step.gradient_out) = State{};
    state(step.gradient_out).written = mark;
  }
}

void Execution::hop(const Step& step) {
  Transport& transport = executor_.transport();
  const Channel channel = step.channel;
  State& source = state(step.send);
  if (source.arrived) transport.order_channel_after_received(channel, *source.arrived);
  if (source.written) transport.order_channel_after(channel, source.written);
  State& target = state(step.receive);
  if (target.arrived) transport.order_channel_after_received(channel, *target.arrived);
  if (target.written) transport.order_channel_after(channel, target.written);
  for (const Mark& read : target.read) transport.order_channel_after(channel, read);
  for (const auto& departing : target.departing) transport.order_channel_after_sent(channel, *departing);

  int& index = hop_index_[static_cast<size_t>(channel)];
  Hop hop{channel,
          step.to,
          step.from,
          spans(step.send, step.send_owner),
          spans(step.receive, step.receive_owner),
          slot_of(step.send),
          slot_of(step.receive),
          operation_,
          index++,
          schedule_.hops(channel)};
  const std::shared_ptr<Transfer> transfer = transport.post(hop);
  source.departing.push_back(transfer);
  target = State{};
  target.arrived = transfer;

  ++executor_.hops_[static_cast<size_t>(channel)];
  for (const Span& span : hop.send) executor_.bytes_[static_cast<size_t>(channel)] += static_cast<int64_t>(span.bytes);
}

void Execution::copy_or_add(const Step& step) {
  State& source = state(step.send);
  if (source.arrived) source.arrived->wait_received();
  State& target = state(step.receive);
  if (target.arrived) target.arrived->wait_received();
  for (const auto& departing : target.departing) departing->wait_sent();
  const auto from = views(step.send, step.send_owner);
  const auto to = views(step.receive, step.receive_owner);
  for (size_t part = 0; part < from.size(); ++part) {
    if (step.action == Action::copy) {
      to[part].copy_(from[part]);
    } else {
      to[part].add_(from[part]);
    }
  }
  const Mark mark = executor_.transport().mark_compute();
  source.read.push_back(mark);
  target = State{};
  target.written = mark;
}

// Orders the compute lane after every hop, so that home tensors, outputs and slots are free for whoever comes next on
// it. This is the one place where the lifetime of tensors across lanes is settled.
void Execution::end() {
  ended_ = true;
  for (auto& [buffer, state] : states_) {
    if (state.arrived) state.arrived->wait_received();
    for (const auto& departing : state.departing) departing->wait_sent();
  }
  states_.clear();
  executor_.last_ = executor_.transport().mark_compute();
  return_slots();
}

}  // namespace rtp
