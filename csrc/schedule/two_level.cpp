#include "schedule/two_level.h"

#include <array>
#include <map>
#include <utility>

namespace rtp {
namespace {

// Hosts and places relative to one rank, and the slots by purpose.
class Levels {
 public:
  explicit Levels(Builder& builder)
      : builder_(builder), hosts_(builder.options().hosts), places_(builder.ranks() / builder.options().hosts) {}

  Builder& builder() { return builder_; }
  const ScheduleOptions& options() const { return builder_.options(); }
  int hosts() const { return hosts_; }
  int places() const { return places_; }

  // Returns the rank, or owner, at the given distance in hosts and places (negative: down).
  int at(int hosts, int places) const {
    const auto wrapped = [](int value, int size) { return (value % size + size) % size; };
    return wrapped(builder_.rank() / places_ + hosts, hosts_) * places_ +
           wrapped(builder_.rank() % places_ + places, places_);
  }

  // One of the two slots of a level.
  Buffer inner(Channel channel, int index) { return slot(channel, index % 2); }
  Buffer outer(Channel channel, int index) { return slot(channel, 2 + index % 2); }
  static Buffer home(Channel channel) { return {channel, Buffer::kHome}; }

  // A hop of `places` inside the host, or of `hosts` to the same place of another host.
  void hop_inside(Channel channel, int places, int send_owner, int receive_owner, Buffer send, Buffer receive) {
    builder_.hop(channel, at(0, places), at(0, -places), send_owner, receive_owner, send, receive);
  }
  void hop_outside(Channel channel, int hosts, int send_owner, int receive_owner, Buffer send, Buffer receive) {
    builder_.hop(channel, at(hosts, 0), at(-hosts, 0), send_owner, receive_owner, send, receive, Half::whole, true);
  }
  void add(int owner, Buffer from, Buffer to) { builder_.local(Action::add, Channel::gradient, owner, from, to); }

 private:
  // Slots are numbered in the order of first use: no number is skipped, and the first hop arrives in slot 0.
  Buffer slot(Channel channel, int place) {
    auto& numbers = numbers_[static_cast<size_t>(channel)];
    const int next = static_cast<int>(numbers.size());
    return builder_.slot(channel, numbers.try_emplace(place, next).first->second);
  }

  Builder& builder_;
  const int hosts_, places_;
  std::array<std::map<int, int>, 2> numbers_;
};

// The weights of a pass. `direction` is -1 in a forward, where the host and place of the current shard decrease, and +1
// in a backward.
class Weights {
 public:
  Weights(Levels& levels, int direction) : levels_(levels), direction_(direction) {}

  // The owner and buffer of the shard in step `s` of phase `p`. The first slot of a phase is the last one of the
  // previous phase, which is free when the phase begins.
  int owner(int p, int s) const { return levels_.at(direction_ * p, direction_ * s); }
  Buffer buffer(int p, int s) {
    if (s > 0) return levels_.inner(Channel::weight, p * levels_.places() + s - 1);
    return p == 0 ? Levels::home(Channel::weight) : levels_.outer(Channel::weight, p - 1);
  }

  // Posts the hops that overlap with step `s` of phase `p`: the shard of the next step and, in the first step, that of
  // the next phase.
  void post(int p, int s) {
    if (s == 0 && p + 1 < levels_.hosts()) {
      const Buffer send = buffer(p, 0), receive = buffer(p + 1, 0);
      levels_.hop_outside(Channel::weight, -direction_, owner(p, 0), owner(p + 1, 0), send, receive);
    }
    if (s + 1 < levels_.places()) {
      const Buffer send = buffer(p, s), receive = buffer(p, s + 1);
      levels_.hop_inside(Channel::weight, -direction_, owner(p, s), owner(p, s + 1), send, receive);
    }
  }

 private:
  Levels& levels_;
  const int direction_;
};

void build_forward(Levels& levels) {
  Weights weights(levels, -1);
  for (int p = 0; p < levels.hosts(); ++p) {
    for (int s = 0; s < levels.places(); ++s) {
      weights.post(p, s);
      levels.builder().compute(Compute::forward, weights.owner(p, s), weights.buffer(p, s));
    }
  }
}

// The gradients of a backward whose wgrads need no weight. Phases count from 1 to K, the last for the shards owned by
// this host; steps count from 1 to G, the last for the shard of this place.
class Gradients {
 public:
  explicit Gradients(Levels& levels) : levels_(levels) {}

  void compute(int q, int s) {
    const bool ends = s == levels_.places(), last_phase = q == levels_.hosts();
    const Buffer in = s == 1 ? kNoBuffer : partial_;
    const Buffer out = s == 1 ? inner(0) : (ends && last_phase ? home() : partial_);
    levels_.builder().compute(Compute::wgrad, levels_.at(q, s), kNoBuffer, in, out);
    if (!ends) {
      const bool last = s + 1 == levels_.places();
      const bool lands_home = last_phase && !levels_.options().receive_in_slots;
      partial_ = last && q == 1 ? sum(q) : (last && lands_home ? home() : inner(s));
      levels_.hop_inside(Channel::gradient, -1, levels_.at(q, s), levels_.at(q, s + 1), out, partial_);
    } else if (last_phase) {
      levels_.add(levels_.at(0, 0), sum(q), home());
    } else {
      if (q > 1) levels_.add(levels_.at(q, 0), out, sum(q));
      levels_.hop_outside(Channel::gradient, -1, levels_.at(q, 0), levels_.at(q + 1, 0), sum(q), sum(q + 1));
    }
  }

 private:
  static Buffer home() { return Levels::home(Channel::gradient); }
  Buffer inner(int index) { return levels_.inner(Channel::gradient, index); }
  // The slot in which the sum of the previous hosts arrives for phase `q`, and from which it is sent after the phase.
  Buffer sum(int q) { return levels_.outer(Channel::gradient, q - 1); }

  Levels& levels_;
  Buffer partial_ = kNoBuffer;  // received partial sum inside the host, input of the next wgrad
};

// dgrad and wgrad alternate as in a ring: dgrad | wgrad dgrad | ... | wgrad. Their phases are one wgrad apart.
void build_backward(Levels& levels) {
  const int ranks = levels.builder().ranks(), places = levels.places();
  Weights weights(levels, +1);
  Gradients gradients(levels);
  for (int step = 0; step <= ranks; ++step) {
    if (levels.options().wgrad && step > 0) gradients.compute(1 + (step - 1) / places, 1 + (step - 1) % places);
    if (levels.options().dgrad && step < ranks) {
      const int p = step / places, s = step % places;
      weights.post(p, s);
      levels.builder().compute(Compute::dgrad, weights.owner(p, s), weights.buffer(p, s));
    }
  }
}

// Each phase is the backward of a bundle in a ring of its own: its last wgrad, of the shard at this place, waits for no
// hop from inside the host. In the first phase, that wgrad starts from zero in the local gradient. The other phases add
// to the sum from host n + 1 and send it on; the last of these hops, which delivers the sum to its owner, overlaps with
// no compute.
void build_bundle_backward(Levels& levels) {
  Builder& builder = levels.builder();
  const bool wgrad = levels.options().wgrad;
  const Buffer home = Levels::home(Channel::gradient);
  const auto sum = [&](int p) { return levels.outer(Channel::gradient, p - 1); };
  Weights weights(levels, +1);
  for (int p = 0; p < levels.hosts(); ++p) {
    Buffer partial = kNoBuffer;
    for (int s = 0; s < levels.places(); ++s) {
      weights.post(p, s);
      builder.compute(Compute::dgrad, weights.owner(p, s), weights.buffer(p, s));
      if (!wgrad || s == 0) continue;
      const Buffer out = partial.exists() ? partial : levels.inner(Channel::gradient, 0);
      builder.compute(Compute::wgrad, levels.at(p, s), weights.buffer(p, s), partial, out);
      partial = levels.inner(Channel::gradient, s);
      levels.hop_inside(Channel::gradient, -1, levels.at(p, s), levels.at(p, s + 1), out, partial);
    }
    if (!wgrad) continue;
    const Buffer into = p == 0 ? home : sum(p);
    builder.compute(Compute::wgrad, levels.at(p, 0), weights.buffer(p, 0), p > 1 ? into : kNoBuffer, into);
    levels.add(levels.at(p, 0), partial, into);
    if (p > 0) {
      levels.hop_outside(Channel::gradient, -1, levels.at(p, 0), levels.at(p + 1, 0), into, sum(p + 1));
    }
  }
  if (wgrad) levels.add(levels.at(0, 0), sum(levels.hosts()), home);
}

}  // namespace

void build_two_level(Builder& builder) {
  Levels levels(builder);
  if (builder.options().pass == Pass::forward) {
    build_forward(levels);
  } else if (builder.options().bundle) {
    build_bundle_backward(levels);
  } else {
    build_backward(levels);
  }
}

}  // namespace rtp
