#include "schedule/schedule.h"

#include <optional>

#include "base/checks.h"
#include "schedule/builder.h"
#include "schedule/direct_gradients.h"
#include "schedule/two_level.h"

namespace rtp {
namespace {

// The weights that pass through one rank. `direction` is -1 if the owners of the shards are r, r-1, ... (forward) and
// +1 if they are r, r+1, ... (backward).
class WeightRotation {
 public:
  WeightRotation(Builder& builder, int direction) : builder_(builder), direction_(direction) {}

  // The buffer that holds the shard of step `s`, and its owner.
  Buffer buffer(int s) const {
    if (s == 0 || builder_.options().sourced) return home();
    if (builder_.options().in_place) return s % 2 == 0 ? home() : builder_.slot(Channel::weight, 0);
    return builder_.slot(Channel::weight, (s - 1) % 2);
  }
  int owner(int s) const {
    const bool levels = builder_.options().sourced && builder_.options().hosts > 1;
    return levels ? alternating_owner(s) : builder_.at(direction_ * s);
  }

  // Posts the hop of the shard of step s + 1. In place, one more hop returns the shard to its owner.
  void post(int s) {
    const bool in_place = builder_.options().in_place;
    const bool none = builder_.ranks() == 1 || builder_.options().sourced;
    const int hops = none ? 0 : (in_place ? builder_.ranks() : builder_.ranks() - 1);
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

  // After an odd number of hops in place, the local shard is in the slot and must be copied back.
  void copy_home() {
    const int ranks = builder_.ranks();
    if (builder_.options().in_place && ranks > 1 && ranks % 2 == 1) {
      builder_.local(Action::copy, Channel::weight, builder_.at(0), buffer(ranks), home());
    }
  }

 private:
  static Buffer home() { return {Channel::weight, Buffer::kHome}; }

  // The owners of sourced shards of several hosts: those of this host, evenly mixed with those of others. The latter
  // come in the same steps on all ranks of a host, so that one of them can pull a shard for all.
  int alternating_owner(int s) const {
    const int ranks = builder_.ranks(), hosts = builder_.options().hosts;
    const int per_host = ranks / hosts, place = builder_.rank() % per_host, first = builder_.rank() - place;
    if (s % hosts == 0) return first + (place - s / hosts + per_host) % per_host;
    return (first + ranks - s + s / hosts) % ranks;
  }

  Builder& builder_;
  int direction_;
};

void build_forward(Builder& builder) {
  WeightRotation weights(builder, -1);
  for (int s = 0; s < builder.ranks(); ++s) {
    weights.post(s);
    builder.compute(Compute::forward, weights.owner(s), weights.buffer(s));
  }
  weights.copy_home();
}

// The partial gradients, or one half of them: wgrad(r+1), ..., wgrad(r+R-1), wgrad(r). Each adds to the received
// partial sum and sends the result on, except the last, which writes the local gradient.
class GradientRotation {
 public:
  GradientRotation(Builder& builder, Half half) : builder_(builder), half_(half) {}

  // Adds this rank's contribution to the gradient of shard r + s, 1 <= s <= R.
  void compute(int s) {
    const bool last = s == builder_.ranks();
    const bool from_zero = last && builder_.options().late;
    out_ = last ? home() : (partial_.exists() ? partial_ : slot(0));
    builder_.compute(Compute::wgrad, builder_.at(s), kNoBuffer, from_zero ? kNoBuffer : partial_, out_, half_);
  }
  void post(int s) {
    const int ranks = builder_.ranks();
    if (s == ranks) return;
    const ScheduleOptions& options = builder_.options();
    const bool lands_home = s == ranks - 1 && !options.receive_in_slots && !options.late;
    partial_ = lands_home ? home() : slot(s % 2);
    builder_.hop(Channel::gradient, builder_.at(-1), builder_.at(1), builder_.at(s), builder_.at(s + 1), out_, partial_,
                 half_);
  }

  // Adds the last arrival if the last product did not.
  void land() {
    const bool due = builder_.options().late && partial_.exists();
    if (due) builder_.local(Action::add, Channel::gradient, builder_.at(0), partial_, home());
  }

 private:
  static Buffer home() { return {Channel::gradient, Buffer::kHome}; }
  Buffer slot(int index) {  // the slots of the halves alternate, so that with two ranks no slot number is skipped
    const int place = half_ == Half::whole ? index : 2 * index + (half_ == Half::second ? 1 : 0);
    return builder_.slot(Channel::gradient, place);
  }

  Builder& builder_;
  Half half_;
  Buffer out_ = kNoBuffer;
  Buffer partial_ = kNoBuffer;  // received partial sum, input of the next wgrad
};

// dgrad(r) | wgrad(r+1) dgrad(r+1) | ... | wgrad(r): a gradient hop overlaps with a dgrad, a weight hop with a wgrad
// and a dgrad. Hops are enqueued in the order w1, g1, w2, g2, ...: with gradients first, a single communicator would
// deadlock. In halves, the hop of the first half also overlaps with the wgrad of the second. With late gradients,
// the last wgrad starts from zero, and the last arrival is added at the end of the pass or after it.
void build_backward(Builder& builder) {
  const int ranks = builder.ranks();
  const ScheduleOptions& options = builder.options();
  WeightRotation weights(builder, +1);
  std::optional<DirectGradients> direct;
  std::vector<GradientRotation> gradients;
  if (options.gradient_route == GradientRoute::direct) {
    direct.emplace(builder);
  } else if (options.wgrad && !options.halves) {
    gradients.emplace_back(builder, Half::whole);
  } else if (options.wgrad) {
    gradients.emplace_back(builder, Half::first);
    gradients.emplace_back(builder, Half::second);
  }

  if (options.dgrad) {
    weights.post(0);
    builder.compute(Compute::dgrad, weights.owner(0), weights.buffer(0));
  }
  for (int s = 1; s <= ranks; ++s) {
    if (direct) direct->compute(s);
    for (GradientRotation& gradient : gradients) {
      gradient.compute(s);
      gradient.post(s);
    }
    if (options.dgrad && s < ranks) {
      weights.post(s);
      builder.compute(Compute::dgrad, weights.owner(s), weights.buffer(s));
    }
  }
  if (options.dgrad) weights.copy_home();
  if (direct) direct->land();
  for (GradientRotation& gradient : gradients) gradient.land();
}

// dgrad(r) | dgrad(r+1) wgrad(r+1) | ... | dgrad(r-1) wgrad(r-1) | wgrad(r): as for a single weight, but wgrad(j) must
// follow dgrad(j). A gradient hop overlaps with the next dgrad, and the last one with wgrad(r), which starts from zero
// so that it need not wait for it; the arrival is added afterwards.
void build_bundle_backward(Builder& builder) {
  const int ranks = builder.ranks();
  const Buffer home{Channel::gradient, Buffer::kHome};
  const bool wgrad = builder.options().wgrad;
  WeightRotation weights(builder, +1);
  std::optional<DirectGradients> direct;
  if (builder.options().gradient_route == GradientRoute::direct) direct.emplace(builder);

  weights.post(0);
  builder.compute(Compute::dgrad, weights.owner(0), weights.buffer(0));
  Buffer partial = kNoBuffer;
  for (int s = 1; s < ranks; ++s) {
    weights.post(s);
    builder.compute(Compute::dgrad, weights.owner(s), weights.buffer(s));
    if (direct) direct->compute(s, weights.buffer(s));
    if (!wgrad || direct) continue;
    const Buffer out = partial.exists() ? partial : builder.slot(Channel::gradient, 0);
    builder.compute(Compute::wgrad, builder.at(s), weights.buffer(s), partial, out);
    partial = builder.slot(Channel::gradient, s % 2);
    builder.hop(Channel::gradient, builder.at(-1), builder.at(1), builder.at(s), builder.at(s + 1), out, partial);
  }
  weights.copy_home();
  if (direct) {
    direct->compute(ranks, weights.buffer(0));
    direct->land();
  }
  if (!wgrad || direct) return;
  builder.compute(Compute::wgrad, builder.at(0), weights.buffer(0), kNoBuffer, home);
  if (partial.exists()) builder.local(Action::add, Channel::gradient, builder.at(0), partial, home);
}

// Sends every shard directly from its owner to every rank.
Buffer gather_weights(Builder& builder) {
  const Buffer home{Channel::weight, Buffer::kHome};
  const Buffer whole = builder.whole(Channel::weight);
  builder.local(Action::copy, Channel::weight, builder.at(0), home, whole);
  for (int s = 1; s < builder.ranks(); ++s) {
    builder.hop(Channel::weight, builder.at(s), builder.at(-s), builder.at(0), builder.at(-s), whole, whole);
  }
  return whole;
}

void build_gather_forward(Builder& builder) { builder.compute(Compute::forward, kAllOwners, gather_weights(builder)); }

// One wgrad of the whole weight, followed by a reduce-scatter around the ring.
void build_gather_backward(Builder& builder) {
  const int ranks = builder.ranks();
  const ScheduleOptions& options = builder.options();
  const Buffer weight = options.dgrad ? gather_weights(builder) : kNoBuffer;
  if (!options.wgrad) {
    if (options.dgrad) builder.compute(Compute::dgrad, kAllOwners, weight);
    return;
  }
  const Buffer whole = builder.whole(Channel::gradient);
  const auto arrived = [&](int s) { return builder.slot(Channel::gradient, (s + 1) % 2); };
  const auto post = [&](int s) {
    builder.hop(Channel::gradient, builder.at(-1), builder.at(1), builder.at(s), builder.at(s + 1), whole, arrived(s));
  };
  builder.compute(Compute::wgrad, kAllOwners, kNoBuffer, kNoBuffer, whole);
  if (ranks > 1) post(1);
  if (options.dgrad) builder.compute(Compute::dgrad, kAllOwners, weight);
  for (int s = 1; s < ranks; ++s) {
    builder.local(Action::add, Channel::gradient, builder.at(s + 1), arrived(s), whole);
    if (s + 1 < ranks) post(s + 1);
  }
  builder.local(Action::copy, Channel::gradient, builder.at(0), whole, {Channel::gradient, Buffer::kHome});
}

// Appends the accesses of a buffer by a step for the shard of `owner`.
void add_access(std::vector<Access>& accesses, const Step& step, Buffer buffer, int owner, int ranks) {
  if (!buffer.exists()) return;
  if (buffer.is_whole() && owner == kAllOwners) {
    for (int each = 0; each < ranks; ++each) accesses.push_back({buffer, each});
  } else if (buffer.is_whole()) {
    accesses.push_back({buffer, owner});
  } else {
    const bool part_of_home = buffer.is_home() && step.half != Half::whole;
    accesses.push_back({buffer, part_of_home ? static_cast<int>(step.half) : Access::kAll});
  }
}

std::string shard_name(const Step& step, char letter, int owner) {
  const char* half = step.half == Half::whole ? "" : (step.half == Half::first ? "a" : "b");
  return owner == kAllOwners ? concat(letter) : concat(letter, owner, half);
}

}  // namespace

std::vector<Access> reads(const Step& step, int ranks) {
  std::vector<Access> accesses;
  if (step.action == Action::compute) {
    add_access(accesses, step, step.weight, step.owner, ranks);
    add_access(accesses, step, step.gradient_in, step.owner, ranks);
  } else {
    for (Buffer from = step.send; from.slot < step.send.slot + step.count; ++from.slot) {
      add_access(accesses, step, from, step.send_owner, ranks);
    }
    if (step.action == Action::add) add_access(accesses, step, step.receive, step.receive_owner, ranks);
  }
  return accesses;
}

std::vector<Access> writes(const Step& step, int ranks) {
  std::vector<Access> accesses;
  if (step.action == Action::compute) {
    add_access(accesses, step, step.gradient_out, step.owner, ranks);
  } else {
    add_access(accesses, step, step.receive, step.receive_owner, ranks);
  }
  return accesses;
}

std::string label(const Step& step) {
  if (step.action == Action::compute) {
    const char letter = step.compute == Compute::wgrad ? 'G' : 'W';
    const char* sum = step.compute != Compute::wgrad ? "" : (step.gradient_in.exists() ? " +=" : " =");
    return concat(name(step.compute), ' ', shard_name(step, letter, step.owner), sum);
  }
  const char letter = step.channel == Channel::weight ? 'W' : 'G';
  if (step.action != Action::hop) {
    const Buffer& to = step.receive;
    const std::string place = to.is_whole() ? "whole" : (to.is_home() ? "home" : concat("slot ", to.slot));
    return concat(step.action == Action::add ? "add " : "", shard_name(step, letter, step.send_owner), " to ", place);
  }
  return concat(shard_name(step, letter, step.send_owner), " -> ", step.to, ", ",
                shard_name(step, letter, step.receive_owner), " <- ", step.from);
}

Schedule make_schedule(int ranks, int rank, const ScheduleOptions& options) {
  RTP_CHECK_VALUE(ranks >= 1, "schedule: expected ranks >= 1, got ", ranks);
  RTP_CHECK_VALUE(rank >= 0 && rank < ranks, "schedule: expected 0 <= rank < ", ranks, ", got ", rank);
  RTP_CHECK_VALUE(options.hosts >= 1 && ranks % options.hosts == 0, "schedule: expected hosts of equally many of the ",
                  ranks, " ranks, got ", options.hosts, " hosts");
  Builder builder(ranks, rank, options);
  const bool gathers = builder.options().route == Route::gather;
  if (builder.options().route == Route::two_level) {
    build_two_level(builder);
  } else if (options.pass == Pass::forward) {
    gathers ? build_gather_forward(builder) : build_forward(builder);
  } else if (gathers) {
    build_gather_backward(builder);
  } else if (options.bundle) {
    build_bundle_backward(builder);
  } else {
    build_backward(builder);
  }
  return builder.finish();
}

const char* name(Channel channel) { return channel == Channel::weight ? "weight" : "gradient"; }
const char* name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
const char* name(Route route) {
  switch (route) {
    case Route::ring:
      return "ring";
    case Route::direct:
      return "direct";
    case Route::gather:
      return "gather";
    case Route::two_level:
      return "two-level";
  }
  return "?";
}
const char* name(GradientRoute route) { return route == GradientRoute::chain ? "chain" : "direct"; }
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
