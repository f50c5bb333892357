// Common part of all schedule builders.
#pragma once

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "schedule/schedule.h"

namespace rtp {

// Appends steps to a schedule and counts the slots that they use.
class Builder {
 public:
  Builder(int ranks, int rank, const ScheduleOptions& options) {
    schedule_.ranks = ranks;
    schedule_.rank = rank;
    schedule_.options = options;
    ScheduleOptions& chosen = schedule_.options;
    // One host, or hosts of one rank each, form a single level.
    if (chosen.route == Route::two_level && (chosen.hosts == 1 || chosen.hosts == ranks)) chosen.route = Route::ring;
    RTP_CHECK_VALUE(!chosen.in_place || chosen.route != Route::two_level,
                    "schedule: expected weights that travel out of place on route two-level, got in_place");
    RTP_CHECK_VALUE(!chosen.sourced || (chosen.pass == Pass::forward && !chosen.in_place),
                    "a model that rotate_for_inference has converted computes forwards only, got a backward: "
                    "fully_rotate converts models that train");
    if (chosen.sourced) chosen.route = Route::direct;
    if (chosen.in_place) chosen.route = Route::ring;  // the local shard itself travels from neighbour to neighbour
    if (chosen.route == Route::gather) chosen.route = Route::direct, chosen.group = ranks;
    chosen.group = std::min(chosen.group, ranks);
    if (chosen.in_place || chosen.sourced || chosen.route == Route::two_level) chosen.group = 1;
    chosen.collective = chosen.collective && chosen.group == ranks && ranks > 1;
    const bool gradients = chosen.pass == Pass::backward && chosen.wgrad, levels = chosen.route == Route::two_level;
    const bool direct = chosen.gradient_route == GradientRoute::direct && gradients && !levels;
    RTP_CHECK_VALUE(!chosen.collective || !direct,
                    "schedule: expected gradient route chain with collectives, which add up gradients, got direct");
    chosen.narrow = chosen.narrow && direct && ranks > 1;
    // With two ranks, both routes send one contribution, and the chain needs no addition.
    chosen.gradient_route = direct && (ranks > 2 || chosen.narrow) ? GradientRoute::direct : GradientRoute::chain;
    chosen.apart = chosen.apart && chosen.gradient_route == GradientRoute::direct && ranks > 2;
    chosen.halves =
        chosen.halves && gradients && !levels && !chosen.collective && chosen.gradient_route == GradientRoute::chain;
    chosen.two_lanes = chosen.two_lanes && !chosen.bundle && chosen.group == 1 && !chosen.sourced;
    chosen.late = chosen.late && gradients;
  }

  int ranks() const { return schedule_.ranks; }
  int rank() const { return schedule_.rank; }
  const ScheduleOptions& options() const { return schedule_.options; }

  // Returns the rank, or owner, `distance` places up the ring (down if negative).
  int at(int distance) const {
    const int ranks = schedule_.ranks;
    return ((schedule_.rank + distance) % ranks + ranks) % ranks;
  }

  Buffer home(Channel channel) const { return {channel, Buffer::kHome, 0, 1, Buffer::kAnywhere, halves(channel)}; }
  // Returns a slot with the shards of `count` owners from `first` on. All slots of groups are alike, so that a place is
  // the same memory in every group.
  Buffer slot(Channel channel, int index, int first = 0, int count = 1) {
    places(channel, index, count > 1 ? options().group : 1, Buffer::kAnywhere);
    return {channel, index, first, count, Buffer::kAnywhere, halves(channel)};
  }
  // Returns place `at` of a slot with room for `count` shards.
  Buffer places(Channel channel, int index, int count, int at) {
    std::vector<int>& slots = channel == Channel::weight ? schedule_.weight_slots : schedule_.gradient_slots;
    slots.resize(std::max(slots.size(), static_cast<size_t>(index) + 1));
    slots[static_cast<size_t>(index)] = count;
    return {channel, index, 0, count, at, halves(channel)};
  }

  void hop(Channel channel, int to, int from, int send_owner, int receive_owner, Buffer send, Buffer receive,
           Half half = Half::whole, bool outer = false) {
    Step step;
    step.action = Action::hop;
    step.channel = channel;
    step.to = to;
    step.from = from;
    step.send_owner = send_owner;
    step.receive_owner = receive_owner;
    step.send = send;
    step.receive = receive;
    step.half = half;
    step.outer = outer;
    ++(channel == Channel::weight ? schedule_.weight_hops : schedule_.gradient_hops);
    schedule_.steps.push_back(step);
  }

  // A gather or scatter of the shards in a slot that has a place for every owner.
  void collective(Action action, Channel channel, Buffer slot) {
    hop(channel, -1, -1, rank(), rank(), slot, slot);
    schedule_.steps.back().action = action;
  }

  // Copies `from` to `to` on this rank, or adds it; then adds the places after it, `count` in all. Gradients are on the
  // stream of the wgrads, so that no dgrad waits for a hop.
  void local(Action action, Channel channel, int owner, Buffer from, Buffer to, Half half = Half::whole,
             int count = 1) {
    Step step;
    step.action = action;
    step.channel = channel;
    step.send_owner = step.receive_owner = owner;
    step.send = from;
    step.receive = to;
    step.half = half;
    step.count = count;
    step.lane = options().two_lanes && channel == Channel::gradient ? 1 : 0;
    schedule_.steps.push_back(step);
  }

  void compute(Compute kind, int owner, Buffer weight, Buffer gradient_in = kNoBuffer, Buffer gradient_out = kNoBuffer,
               Half half = Half::whole, int owners = 1) {
    Step step;
    step.compute = kind;
    step.owner = owner;
    step.owners = owners;
    step.weight = weight;
    step.gradient_in = gradient_in;
    step.gradient_out = gradient_out;
    step.half = half;
    if (options().two_lanes) {
      step.lane = kind == Compute::forward ? forwards_++ % 2 : (kind == Compute::wgrad ? 1 : 0);
    }
    schedule_.steps.push_back(step);
  }

  Schedule finish() {
    find_contents();
    for (const Step& step : schedule_.steps) {
      schedule_.accesses.push_back({reads(step, schedule_.ranks), writes(step, schedule_.ranks)});
      const Buffer& read = step.travels() ? step.send : step.weight;
      const bool weight = read.channel == Channel::weight && read.is_home();
      if (!weight || step.action == Action::copy || step.action == Action::add) continue;
      schedule_.uses_home = true;
      schedule_.last_of_home = static_cast<int>(&step - schedule_.steps.data());
    }
    return std::move(schedule_);
  }

 private:
  Halves halves(Channel channel) const {
    return channel == Channel::gradient && options().halves ? Halves::together : Halves::none;
  }
  // Numbers the contents of the slots of weights: a hop into a slot brings a new one, in a slot of a group the first.
  void find_contents() {
    struct Held {
      int content = -1, first = -1;
    };
    std::vector<Held> held(schedule_.weight_slots.size());
    const auto in_slot = [](const Buffer& buffer) { return buffer.channel == Channel::weight && buffer.slot >= 0; };
    for (int position = 0; position < static_cast<int>(schedule_.steps.size()); ++position) {
      Step& step = schedule_.steps[static_cast<size_t>(position)];
      for (Buffer* read : {&step.send, &step.weight}) {
        if (!in_slot(*read)) continue;
        read->content = held[static_cast<size_t>(read->slot)].content;
        Schedule::Content& content = schedule_.contents[static_cast<size_t>(read->content)];
        content.last_use = position;
        if (read == &step.weight) content.first_product = std::min(content.first_product, position);
      }
      if (step.action == Action::compute || step.channel != Channel::weight) continue;
      schedule_.moves.push_back(position);
      if (!in_slot(step.receive)) continue;
      Held& slot = held[static_cast<size_t>(step.receive.slot)];
      if (!step.receive.is_group() || slot.first != step.receive.first) {
        slot = {static_cast<int>(schedule_.contents.size()), step.receive.is_group() ? step.receive.first : -1};
        schedule_.contents.push_back({schedule_.weight_slots[static_cast<size_t>(step.receive.slot)],
                                      static_cast<int>(schedule_.steps.size()), position});
      }
      step.receive.content = slot.content;
    }
  }

  Schedule schedule_;
  int forwards_ = 0;
};

}  // namespace rtp
