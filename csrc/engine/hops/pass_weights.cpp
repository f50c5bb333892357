#include "engine/hops/pass_weights.h"

#include <utility>

#include "base/checks.h"
#include "base/ranges.h"
#include "engine/hops/gradient_quantizer.h"

namespace rtp {
namespace {

// The uses of all places of a group's slot, for the passes that get it next. A product has read each place that a hop
// or copy has written.
Usage folded(std::vector<Usage> places, Streams& streams) {
  Usage all;
  for (Usage& place : places) {
    if (place.read.empty()) {
      place.wait_for_all(streams);
      continue;
    }
    for (auto& hop : place.sending) all.record_send(std::move(hop));
    for (StreamEvent& event : place.read) {
      if (all.read.empty() || all.read.back() != event) all.record_read(std::move(event));
    }
  }
  return all;
}

}  // namespace

WeightSizes RingParts::sizes(const Schedule& schedule, const std::optional<ShardBundle>& weights) const {
  WeightSizes sizes;
  if (!weights || schedule.options.sourced) return sizes;
  if (!schedule.weight_slots.empty()) sizes.slot = weights->slot_bytes(schedule.weight_slots.front());
  const Movement movement{weights->cast(), transport->sends_anywhere(), transport->receives_anywhere()};
  if (schedule.uses_home && movement.staged(schedule.hops(Channel::weight) > 0)) sizes.staged = weights->slot_bytes();
  return sizes;
}

PassWeights::PassWeights(const RingParts& ring, const Schedule& schedule, WeightSizes sizes,
                         std::optional<ShardBundle> bundle, std::string operation, int64_t& sent)
    : WeightMoves(schedule, sizes),
      ring_(ring),
      bundle_(std::move(bundle)),
      operation_(std::move(operation)),
      sent_(sent),
      contents_(schedule.contents.size()),
      settles_(ring.pool.settles()) {}

void PassWeights::begin(const PassHandle& pass, const Schedule& schedule) {
  WeightMoves::take(schedule);
  begun_ = pass, begins_ = true;
  for (const EventHandle& event : std::exchange(traced_, {})) {
    if (event) event->pass = pass.traced;
  }
}

void PassWeights::take(PassWeights& from, const KeptWeights& found) {
  for (size_t content = 0; content < contents_.size(); ++content) {
    const int taken = found.contents[content];
    contents_[content] = std::exchange(from.contents_[static_cast<size_t>(taken)], {});
    from.lose(taken);
  }
  take_all();
  brought_ = from.bundle_, picked_ = found.tensors;
}

Usage& PassWeights::usage(const Access& access) {
  if (access.buffer.is_home()) return home_;
  Content& content = contents_[static_cast<size_t>(access.buffer.content)];
  return content.places.empty() ? content.slot->usage : content.places[static_cast<size_t>(access.place)];
}

std::vector<Usage*> PassWeights::usages(const std::vector<Access>& accesses) {
  std::vector<Usage*> usages;
  for (const Access& access : accesses) usages.push_back(&usage(access));
  return usages;
}

std::byte* PassWeights::slot_start(const Buffer& buffer) const {
  const auto& slot = buffer.is_home() ? staged_ : contents_[static_cast<size_t>(buffer.content)].slot;
  return slot ? slot->data() : nullptr;
}

std::vector<at::Tensor> PassWeights::views(const Buffer& buffer, int owner, int owners) const {
  if (!buffer.exists()) return {};
  const bool home = buffer.is_home();
  const auto* slot = home ? nullptr : contents_[static_cast<size_t>(buffer.content)].slot.get();
  const Place place = place_of(schedule(), buffer, owner, owners);
  if (home || !brought_) return bundle_->views(place, ring_.rank, slot);
  const std::vector<at::Tensor> brought = brought_->views(place, ring_.rank, slot);
  std::vector<at::Tensor> views;
  for (const size_t tensor : picked_) views.push_back(brought[tensor]);
  return views;
}

void PassWeights::lease(int content, int64_t bytes) {
  Content& leased = contents_[static_cast<size_t>(content)];
  SlotPool& pool = ring_.pool;
  leased.slot = pool.lease(Channel::weight, bytes);
  Usage& usage = leased.slot->usage;
  const bool used = usage.arrived || usage.written || !usage.sending.empty() || !usage.read.empty();
  if (!used && settles_ != pool.settles()) usage.record_write(pool.settled());
  const int shards = schedule().contents[static_cast<size_t>(content)].shards;
  if (shards > 1) leased.places.assign(static_cast<size_t>(shards), std::exchange(usage, {}));
}

void PassWeights::release(int content) {
  Content& left = contents_[static_cast<size_t>(content)];
  if (!left.places.empty()) left.slot->usage = folded(std::exchange(left.places, {}), ring_.streams());
  ring_.pool.give_back(Channel::weight, std::exchange(left.slot, nullptr));
}

void PassWeights::lease_staged(int64_t bytes) {
  staged_ = ring_.pool.lease(Channel::weight, bytes);
  Streams& streams = ring_.streams();
  Sink& sink = ring_.sink;
  const EventHandle waiting = begins_ ? sink.begin_slot(begun_, TraceEvent::kNoStep, "home")
                                      : sink.begin_slot(poster_, poster_position_, "home");
  staged_->usage.wait_for_all(streams);
  sink.end(waiting);
  EventHandle staging;
  if (begins_) {
    staging = sink.begin(begun_, TraceKind::stage, TraceEvent::kNoStep, Lane::compute, "home");
  } else {
    const Step& first = schedule().steps[static_cast<size_t>(schedule().moves.front())];
    staging = traced_.emplace_back(sink.announce(operation_, TraceKind::stage, TraceEvent::kNoStep, first));
  }
  bundle_->stage(streams, staged_->memory, ring_.rank);
  sink.end(staging);
}

void PassWeights::release_staged() {
  if (!staged_) return;  // it could not be allocated
  staged_->usage = std::exchange(home_, {});
  ring_.pool.give_back(Channel::weight, std::exchange(staged_, nullptr));
}

void PassWeights::move(int position) {
  const Step& step = schedule().steps[static_cast<size_t>(position)];
  // The local tensors, or their copy, were written by computes enqueued before this point.
  if (!begins_ && made() == 1) {
    ring_.transport->order_hops_after(Channel::weight, ring_.streams().record_compute());
  }
  step.travels() ? hop(position, step) : copy(position, step);
}

EventHandle PassWeights::begin_event(int position, const Step& step) {
  if (begins_) return ring_.sink.begin(begun_, position, step);
  return traced_.emplace_back(ring_.sink.announce(operation_, TraceKind::step, position, step));
}

void PassWeights::hop(int position, const Step& step) {
  Hop hop = hop_of(schedule(), step, operation_, hops_made_++);
  if (is_collective(step.action)) {
    const Content& content = contents_[static_cast<size_t>(step.receive.content)];
    set_collective_memory(hop, schedule(), *bundle_, content.slot->memory);
  } else {
    const auto send = views(step.send, step.send_owner), receive = views(step.receive, step.receive_owner);
    set_memory(hop, schedule(), step, *bundle_, send, receive);
    hop.send_slot = slot_start(step.send), hop.receive_slot = slot_start(step.receive);
  }
  const Range range([&] { return concat(operation_, ": ", label(step)); });
  const int ranks = schedule().ranks;
  ring_.hops.post(hop, usages(reads(step, ranks)), usages(writes(step, ranks)), begin_event(position, step), poster_,
                  poster_position_);
  if (!begins_) ++sent_;
}

void PassWeights::copy(int position, const Step& step) {
  Streams& streams = ring_.streams();
  const int ranks = schedule().ranks;
  Usage& source = usage(reads(step, ranks).front());
  Usage& target = usage(writes(step, ranks).front());
  const auto after_hop = [](const auto& transfer, End end) { wait(*transfer, end); };
  const auto after_compute = [&](const StreamEvent& event) { streams.order_compute_after(event); };
  source.before_read(after_hop, after_compute);
  target.before_write(after_hop, after_compute);
  const EventHandle traced = begin_event(position, step);
  dequantize_into(streams, views(step.receive, step.receive_owner), {views(step.send, step.send_owner)}, false);
  const StreamEvent copied = streams.record_compute();
  source.record_read(copied), target.record_write(copied);
  ring_.sink.end(traced);
}

void PassWeights::drain() {
  Streams& streams = ring_.streams();
  wait_for_home();
  for (Content& content : contents_) {
    for (Usage& place : content.places) place.wait_for_all(streams);
    if (content.slot) content.slot->usage.wait_for_all(streams);
    content.places.clear();
  }
  give_back();
}

}  // namespace rtp
