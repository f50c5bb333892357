#include "schedule.h"

#include <algorithm>

#include "checks.h"

namespace rtp {
namespace {

// Appends steps to a schedule and hands out the slots that they alternate between.
class Builder {
 public:
  Builder(int ranks, int rank, const ScheduleOptions& options) {
    schedule_.ranks = ranks;
    schedule_.rank = rank;
    schedule_.options = options;
    if (options.in_place) schedule_.options.route = Route::ring;  // the shard itself can only be handed on
  }

  int ranks() const { return schedule_.ranks; }
  const ScheduleOptions& options() const { return schedule_.options; }

  // The rank, or owner, `distance` places up the ring (down it when negative).
  int at(int distance) const {
    const int ranks = schedule_.ranks;
    return ((schedule_.rank + distance) % ranks + ranks) % ranks;
  }

  Buffer slot(Channel channel, int index) {
    int& used = channel == Channel::weight ? schedule_.weight_slots : schedule_.gradient_slots;
    used = std::max(used, index + 1);
    return {channel, index};
  }

  void hop(Channel channel, int to, int from, int send_owner, int receive_owner, Buffer send, Buffer receive) {
    Step step;
    step.action = Action::hop;
    step.channel = channel;
    step.to = to;
    step.from = from;
    step.send_owner = send_owner;
    step.receive_owner = receive_owner;
    step.send = send;
    step.receive = receive;
    schedule_.steps.push_back(step);
  }

  // Copies `from` to `to` on this rank, or adds it.
  void local(Action action, Channel channel, int owner, Buffer from, Buffer to) {
    Step step;
    step.action = action;
    step.channel = channel;
    step.send_owner = step.receive_owner = owner;
    step.send = from;
    step.receive = to;
    schedule_.steps.push_back(step);
  }

  void compute(Compute kind, int owner, Buffer weight, Buffer gradient_in = kNoBuffer,
               Buffer gradient_out = kNoBuffer) {
    Step step;
    step.compute = kind;
    step.owner = owner;
    step.weight = weight;
    step.gradient_in = gradient_in;
    step.gradient_out = gradient_out;
    schedule_.steps.push_back(step);
  }

  Schedule finish() { return std::move(schedule_); }

 private:
  Schedule schedule_;
};

// The journey of the weights through one rank. `direction` is -1 when the shard in hand goes r, r-1, ... (forward)
// and +1 when it goes r, r+1, ... (backward).
class WeightJourney {
 public:
  WeightJourney(Builder& builder, int direction) : builder_(builder), direction_(direction) {}

  // The buffer that holds the shard of step `s`, and its owner.
  Buffer buffer(int s) const {
    if (s == 0) return home();
    if (builder_.options().in_place) return s % 2 == 0 ? home() : builder_.slot(Channel::weight, 0);
    return builder_.slot(Channel::weight, (s - 1) % 2);
  }
  int owner(int s) const { return builder_.at(direction_ * s); }

  // Posts the hop that brings the shard of step s + 1. In place there is one hop more, which brings the shard home.
  void post(int s) {
    const bool in_place = builder_.options().in_place;
    const int hops = builder_.ranks() == 1 ? 0 : (in_place ? builder_.ranks() : builder_.ranks() - 1);
    if (s >= hops) return;
    if (builder_.options().route == Route::direct) {
      const int distance = direction_ * (s + 1);
      builder_.hop(Channel::weight, builder_.at(-distance), builder_.at(distance), owner(0), owner(s + 1), home(),
                   buffer(s + 1));
    } else {
      builder_.hop(Channel::weight, builder_.at(-direction_), builder_.at(direction_), owner(s), owner(s + 1),
                   buffer(s), buffer(s + 1));
    }
  }

  // After an odd number of hops in place the home shard has come back into the slot.
  void settle() {
    const int ranks = builder_.ranks();
    if (builder_.options().in_place && ranks > 1 && ranks % 2 == 1) {
      builder_.local(Action::copy, Channel::weight, builder_.at(0), buffer(ranks), home());
    }
  }

 private:
  static Buffer home() { return {Channel::weight, Buffer::kHome}; }

  Builder& builder_;
  int direction_;
};

void build_forward(Builder& builder) {
  WeightJourney weights(builder, -1);
  for (int s = 0; s < builder.ranks(); ++s) {
    weights.post(s);
    builder.compute(Compute::forward, weights.owner(s), weights.buffer(s));
  }
  weights.settle();
}

// dgrad(r) | wgrad(r+1) dgrad(r+1) | ... | wgrad(r): a gradient hop hides under a dgrad, a weight hop under a
// wgrad and a dgrad. Hops are enqueued w1, g1, w2, g2, ...: gradients first would deadlock a single communicator.
void build_backward(Builder& builder) {
  const int ranks = builder.ranks();
  const ScheduleOptions& options = builder.options();
  const Buffer home{Channel::gradient, Buffer::kHome};
  WeightJourney weights(builder, +1);

  if (options.dgrad) {
    weights.post(0);
    builder.compute(Compute::dgrad, weights.owner(0), weights.buffer(0));
  }
  Buffer partial = kNoBuffer;  // what has arrived for the next wgrad to add to
  for (int s = 1; s <= ranks; ++s) {
    const bool last = s == ranks;
    if (options.wgrad) {
      const Buffer out = last ? home : (partial.exists() ? partial : builder.slot(Channel::gradient, 0));
      builder.compute(Compute::wgrad, builder.at(s), kNoBuffer, partial, out);
      if (!last) {
        const bool lands_home = s == ranks - 1 && !options.receive_in_slots;
        partial = lands_home ? home : builder.slot(Channel::gradient, s % 2);
        builder.hop(Channel::gradient, builder.at(-1), builder.at(1), builder.at(s), builder.at(s + 1), out, partial);
      }
    }
    if (options.dgrad && !last) {
      weights.post(s);
      builder.compute(Compute::dgrad, weights.owner(s), weights.buffer(s));
    }
  }
  if (options.dgrad) weights.settle();
}

// dgrad(r) | dgrad(r+1) wgrad(r+1) | ... | dgrad(r-1) wgrad(r-1) | wgrad(r): as for a single weight, but wgrad(j) can
// only follow dgrad(j). A gradient hop hides under the next dgrad, and the last one under wgrad(r), which starts from
// zero so that it need not wait for it; what has arrived is added afterwards.
void build_bundle_backward(Builder& builder) {
  const int ranks = builder.ranks();
  const Buffer home{Channel::gradient, Buffer::kHome};
  const bool wgrad = builder.options().wgrad;
  WeightJourney weights(builder, +1);

  weights.post(0);
  builder.compute(Compute::dgrad, weights.owner(0), weights.buffer(0));
  Buffer partial = kNoBuffer;
  for (int s = 1; s < ranks; ++s) {
    weights.post(s);
    builder.compute(Compute::dgrad, weights.owner(s), weights.buffer(s));
    if (!wgrad) continue;
    const Buffer out = partial.exists() ? partial : builder.slot(Channel::gradient, 0);
    builder.compute(Compute::wgrad, builder.at(s), weights.buffer(s), partial, out);
    partial = builder.slot(Channel::gradient, s % 2);
    builder.hop(Channel::gradient, builder.at(-1), builder.at(1), builder.at(s), builder.at(s + 1), out, partial);
  }
  weights.settle();
  if (!wgrad) return;
  builder.compute(Compute::wgrad, builder.at(0), weights.buffer(0), kNoBuffer, home);
  if (partial.exists()) builder.local(Action::add, Channel::gradient, builder.at(0), partial, home);
}

}  // namespace

int Schedule::hops(Channel channel) const {
  return static_cast<int>(std::count_if(steps.begin(), steps.end(), [channel](const Step& step) {
    return step.action == Action::hop && step.channel == channel;
  }));
}

Schedule make_schedule(int ranks, int rank, const ScheduleOptions& options) {
  RTP_CHECK_VALUE(ranks >= 1, "schedule: expected ranks >= 1, got ", ranks);
  RTP_CHECK_VALUE(rank >= 0 && rank < ranks, "schedule: expected 0 <= rank < ", ranks, ", got ", rank);
  Builder builder(ranks, rank, options);
  if (options.pass == Pass::forward) {
    build_forward(builder);
  } else if (options.bundle) {
    build_bundle_backward(builder);
  } else {
    build_backward(builder);
  }
  return builder.finish();
}

std::vector<int64_t> shard_sizes(int64_t extent, int ranks) {
  RTP_CHECK_VALUE(extent >= 0 && ranks >= 1, "shard_sizes: expected extent >= 0 and ranks >= 1, got ", extent, " and ",
                  ranks);
  const int64_t chunk = (extent + ranks - 1) / ranks;
  std::vector<int64_t> sizes(ranks);
  for (int owner = 0; owner < ranks; ++owner) {
    sizes[owner] = std::clamp<int64_t>(extent - owner * chunk, 0, chunk);
  }
  return sizes;
}

const char* name(Channel channel) { return channel == Channel::weight ? "weight" : "gradient"; }
const char* name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
const char* name(Route route) { return route == Route::ring ? "ring" : "direct"; }
const char* name(Compute compute) {
  switch (compute) {
    case Compute::forward:
      return "forward";
    case Compute::dgrad:
      return "dgrad";
    case Compute::wgrad:
      return "wgrad";
  }
  return "?";
}
const char* name(Action action) {
  switch (action) {
    case Action::hop:
      return "hop";
    case Action::compute:
      return "compute";
    case Action::copy:
      return "copy";
    case Action::add:
      return "add";
  }
  return "?";
}

}  // namespace rtp
