#include "transport/sink.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checks.h"
#include "transport/transport.h"

namespace rtp {
namespace {

constexpr double kNever = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kShort = 5000;  // nanoseconds: shorter waits get no entry

int64_t now_ns() noexcept { return HostClock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

Lane lane_of(const Step& step) {
  if (step.travels() && step.outer) {
    return step.channel == Channel::weight ? Lane::outer_weight : Lane::outer_gradient;
  }
  if (step.travels()) return step.channel == Channel::weight ? Lane::weight : Lane::gradient;
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

Sink::Sink(std::shared_ptr<Transport> transport)
    : transport_(std::move(transport)), entries_(new Entry[kEntries]{}), names_(new char[kNames * kNameBytes]{}) {
  known_.reserve(kNames);
  name("other operations");
  enlist();
}

Sink::~Sink() { strike(); }

Moment Sink::now() const { return transport_->streams().compute_moment(); }
bool Sink::captures() const { return transport_->streams().capture() != 0; }

// -- events -----------------------------------------------------------------------------------------------------------

uint16_t Sink::name(const std::string& operation) {
  if (named_ != nullptr && named_->first == operation) return named_->second;
  auto found = known_.find(operation);
  if (found == known_.end()) {
    const size_t number = known_.size();
    if (number >= kNames) return 0;
    std::strncpy(names_.get() + number * kNameBytes, operation.c_str(), kNameBytes - 1);
    found = known_.emplace(operation, static_cast<uint16_t>(number)).first;
  }
  named_ = &*found;
  return found->second;
}

Sink::Entry* Sink::add(Kind kind) {
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = entries_[number % kEntries];
  entry.number = 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  entry = Entry{};
  entry.kind = kind;
  entry.begin = now_ns();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  entry.number = number;
  return &entry;
}

uint64_t Sink::add_named(Kind kind, const std::string& operation) {
  if (!on_) return 0;
  Entry* entry = add(kind);
  entry->operation = name(operation);
  return entry->number;
}

void Sink::end_entry(uint64_t number) {
  if (number == 0) return;
  Entry& entry = entries_[number % kEntries];
  if (entry.number == number) entry.end = now_ns();
}

PassHandle Sink::begin_graph(const std::string& operation) { return {add_named(Kind::pass, operation), nullptr}; }

PassHandle Sink::begin_pass(const std::string& operation, const Schedule& schedule) {
  PassHandle pass{add_named(Kind::pass, operation), nullptr};
  if (!tracing_) return pass;
  if (captures()) {
    ++trace_.captured;
    return pass;
  }
  pass.traced = std::make_shared<TracePass>(
      TracePass{recording_, static_cast<int>(trace_.passes.size()), operation, schedule.options, now(), nullptr});
  trace_.passes.push_back(pass.traced);
  return pass;
}

EventHandle Sink::begin_compute(const PassHandle& pass, int position, const Step& step) {
  uint64_t number = 0;
  if (on_ && pass.entry != 0) {
    Entry* entry = add(Kind::compute);
    const Entry& whole = entries_[pass.entry % kEntries];
    if (whole.number == pass.entry) entry->operation = whole.operation;
    const bool computes = step.action == Action::compute;
    entry->from = static_cast<int16_t>(computes ? step.owner : step.send_owner);
    entry->what = computes ? static_cast<uint8_t>(step.compute) : kMove;
    number = entry->number;
  }
  EventHandle event = begin(pass, position, step);
  event.entry = number;
  return event;
}

uint64_t Sink::add_hop(const Hop& hop, int64_t before) {
  posted_[static_cast<size_t>(hop.channel)] = static_cast<uint32_t>(before + 1);
  if (!on_) return 0;
  Entry* entry = add(Kind::hop);
  entry->operation = name(hop.operation);
  entry->channel = hop.channel;
  entry->count = static_cast<uint32_t>(before);
  entry->to = static_cast<int16_t>(hop.to);
  entry->from = static_cast<int16_t>(hop.from);
  entry->index = static_cast<int16_t>(hop.index);
  entry->hops = static_cast<int16_t>(hop.count);
  entry->bytes = hop.bytes_sent();
  return entry->number;
}

std::shared_ptr<Transfer> Sink::post(EventHandle event, const Hop& hop, int64_t before) {
  event.entry = add_hop(hop, before);
  std::shared_ptr<Transfer> transfer = transport_->post(hop);
  if (event) event->end = transport_->moment(hop);
  if (event && !event->end) event->end = transfer->arrived();
  transfer->record(*this, std::move(event));
  return transfer;
}

void Sink::arrive(const EventHandle& hop, const Transfer& transfer) {
  hop->end = transfer.arrived();
  if (!hop->end) hop->end = host_moment();
}

int64_t Sink::begin_wait(uint64_t hop, End which) {
  if (!on_ || hop == 0) return 0;
  const int64_t begin = now_ns();
  waiting_since_ = begin;
  waiting_end_ = which;
  waiting_for_ = hop;
  return begin;
}

void Sink::end_wait(uint64_t hop, End which, int64_t begin) {
  if (begin == 0) return;
  waiting_for_ = 0;
  const int64_t end = now_ns();
  Entry& posted = entries_[hop % kEntries];
  if (posted.number != hop) return;
  int64_t& seen = which == End::received ? posted.end : posted.sent;
  if (seen == 0) seen = end;
  if (end - begin < kShort) return;
  const Entry awaited = posted;  // the new entry may overwrite it
  Entry* entry = add(Kind::wait);
  const uint64_t number = entry->number;
  *entry = awaited;  // copies its operation, channel and peers
  entry->number = number;
  entry->kind = Kind::wait;
  entry->what = static_cast<uint8_t>(which);
  entry->begin = begin;
  entry->end = end;
  entry->sent = 0;
}

uint64_t Sink::begin_collective(const std::string& operation) {
  collective_ = begin_outside(operation, concat("collective: ", operation));
  return add_named(Kind::collective, operation);
}

void Sink::end_collective(uint64_t entry) {
  end_entry(entry);
  end(std::exchange(collective_, {}));
}

// -- events of a trace alone ------------------------------------------------------------------------------------------

EventHandle Sink::keep(const PassHandle& pass, const std::string& operation, TraceKind kind, int step, Lane lane,
                       const std::string& label) {
  trace_.events.push_back(
      std::make_shared<TraceEvent>(TraceEvent{pass.traced, operation, step, kind, lane, label, {}, {}}));
  if (computes(lane)) trace_.events.back()->start = now();  // depart() sets the start of a hop
  return {0, trace_.events.back()};
}

EventHandle Sink::begin(const PassHandle& pass, TraceKind kind, int step, Lane lane, const std::string& label) {
  if (!pass || !tracing_ || pass->recording != recording_) return {};
  return keep(pass, pass->operation, kind, step, lane, label);
}

EventHandle Sink::begin(const PassHandle& pass, int position, const Step& step) {
  return pass ? begin(pass, TraceKind::step, position, lane_of(step), label(step)) : EventHandle();
}

EventHandle Sink::announce(const std::string& operation, TraceKind kind, int position, const Step& hop) {
  if (!tracing_ || captures()) return {};
  return keep({}, operation, kind, position, kind == TraceKind::step ? lane_of(hop) : Lane::compute, label(hop));
}

EventHandle Sink::begin_posting(const PassHandle& pass, int position, const EventHandle& hop) {
  if (!pass || !hop || !on_host_) return {};
  return begin(pass, TraceKind::wait, position, Lane::compute, concat("post ", hop->label));
}

EventHandle Sink::begin_slot(const PassHandle& pass, int position, const std::string& what) {
  return pass ? begin(pass, TraceKind::wait, position, Lane::compute, concat("slot: ", what)) : EventHandle();
}

EventHandle Sink::begin_outside(const std::string& operation, const std::string& label) {
  if (!tracing_ || captures()) return {};
  return keep({}, operation, TraceKind::wait, TraceEvent::kNoStep, Lane::compute, label);
}

void Sink::depart(const EventHandle& event, const Hop& hop) {
  if (!event) return;
  const Moment moment = transport_->moment(hop);
  event->start = moment ? moment : host_moment();
}

// -- the trace --------------------------------------------------------------------------------------------------------

void Sink::start_trace() {
  RTP_CHECK_VALUE(!tracing_, "trace: expected a ring that is not being recorded, got one that is");
  zero_ = now();
  trace_ = {};
  trace_.zero = std::chrono::duration<double>(HostClock::now().time_since_epoch()).count();
  on_host_ = transport_->streams().on_host();
  ++recording_;
  tracing_ = true;
}

Sink::Trace Sink::read_trace() {
  const auto at = [this](const Moment& moment) {
    return moment ? transport_->streams().seconds(zero_, moment) : kNever;
  };
  for (const auto& pass : trace_.passes) pass->began = at(pass->start), pass->ended = at(pass->end);
  std::erase_if(trace_.events, [](const auto& event) { return !event->start || !event->end; });
  std::array<double, 6> arrived{};  // by row: latest arrival so far
  for (const auto& event : trace_.events) {
    event->posted = event->began = at(event->start);
    event->ended = std::max(at(event->end), event->posted);  // small messages may arrive before their hop is posted
    if (computes(event->lane)) continue;
    double& before = arrived[static_cast<size_t>(event->lane)];
    event->began = std::min(std::max(event->posted, before), event->ended);
    before = std::max(before, event->ended);
  }
  return std::exchange(trace_, {});
}

}  // namespace rtp
