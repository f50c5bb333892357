#include "schedule/schedule.h"

#include "base/checks.h"
#include "schedule/builder.h"
#include "schedule/two_level.h"

namespace rtp {
namespace {

// The groups of a pass: the own shard is in the first one, which may lack shards. All groups together have R steps.
class Groups {
 public:
  // `direction`: -1 if the owners of the shards are r, r-1, ... (forward) and +1 if they are r, r+1, ... (backward).
  Groups(const Builder& builder, int direction) : builder_(builder), direction_(direction) {}

  int count() const { return (builder_.ranks() + size() - 1) / size(); }
  // The first step of a group, and the group of a step.
  int begin(int group) const { return group == 0 ? 0 : builder_.ranks() - (count() - group) * size(); }
  int of(int step) const { return count() - 1 - (builder_.ranks() - 1 - step) / size(); }
  int shards(int group) const { return begin(group + 1) - begin(group); }
  int slots() const { return std::min(shards(0) == 1 ? count() - 1 : count(), 2); }
  // The first owner, in the order of owners.
  int owner(int group) const { return builder_.at(direction_ < 0 ? 1 - begin(group + 1) : begin(group)); }
  // The slot of a group; the slots alternate. A first group of one shard has none: its shard is at home.
  Buffer slot(Builder& builder, Channel channel, int group) const {
    const int alone = shards(0) == 1 ? 1 : 0;
    if (group < alone) return builder.home(channel);
    return builder.slot(channel, (group - alone) % 2, owner(group), shards(group));
  }

 private:
  int size() const { return builder_.options().group; }

  const Builder& builder_;
  const int direction_;
};

// The weights that pass through one rank.
class WeightRotation {
 public:
  WeightRotation(Builder& builder, int direction)
      : builder_(builder), direction_(direction), groups_(builder, direction) {}

  // The buffer that holds the shard of step `s` with those of its group, and its owner.
  Buffer buffer(int s) const {
    if (s == 0 && groups_.shards(0) == 1) return home();
    if (builder_.options().sourced) return home();
    if (builder_.options().in_place) return s % 2 == 0 ? home() : builder_.slot(Channel::weight, 0);
    return groups_.slot(builder_, Channel::weight, groups_.of(s));
  }
  int owner(int s) const {
    const bool levels = builder_.options().sourced && builder_.options().hosts > 1;
    return levels ? alternating_owner(s) : builder_.at(direction_ * s);
  }
  int groups() const { return groups_.count(); }
  Buffer slot(int group) const { return buffer(groups_.begin(group)); }

  // Posts the hops whose shards belong to a group, and copies the own shard to the others of its group.
  void fill(int group) {
    if (group == 0 && groups_.shards(0) > 1) {
      builder_.local(Action::copy, Channel::weight, owner(0), home(), buffer(0));
    }
    if (builder_.options().collective) {
      if (group == 0) builder_.collective(Action::gather, Channel::weight, buffer(0));
      return;
    }
    for (int s = groups_.begin(group); s < groups_.begin(group + 1); ++s) post(s - 1);
  }
  void compute(Compute kind, int group) {
    const int first = groups_.begin(group), owners = groups_.shards(group);
    const int owner = owners > 1 ? groups_.owner(group) : this->owner(first);
    builder_.compute(kind, owner, buffer(first), kNoBuffer, kNoBuffer, Half::whole, owners);
  }

  // Posts the hop of the shard of step s + 1. In place, one more hop returns the shard to its owner.
  void post(int s) {
    const bool in_place = builder_.options().in_place;
    const bool none = builder_.ranks() == 1 || builder_.options().sourced;
    const int hops = none ? 0 : (in_place ? builder_.ranks() : builder_.ranks() - 1);
    if (s < 0 || s >= hops) return;
    if (builder_.options().route == Route::direct) {
      const int distance = direction_ * (s + 1);
      // the slot of the only group stays as it is
      builder_.hop(Channel::weight, builder_.at(-distance), builder_.at(distance), owner(0), owner(s + 1),
                   groups() == 1 ? buffer(0) : home(), buffer(s + 1));
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
  Buffer home() const { return builder_.home(Channel::weight); }

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
  Groups groups_;
};

void build_forward(Builder& builder) {
  WeightRotation weights(builder, -1);
  weights.fill(0);
  for (int group = 0; group < weights.groups(); ++group) {
    weights.fill(group + 1);
    weights.compute(Compute::forward, group);
  }
  weights.copy_home();
}

// The gradients of a backward. Contributions of this rank leave group by group. Those to the own gradient go home; a
// wgrad of the own shard alone comes last, so that the last hop overlaps with it.
//
// On the chain the partial sum of shard r + s leaves for rank r - 1 while that of shard r + s + 1 arrives. Without
// groups a wgrad adds to what has arrived, and a hop overlaps with a dgrad; in halves, also with the wgrad of the other
// half. The contributions of a group are one product, as are those of a bundle in halves: there a wgrad starts from
// zero and waits for no hop, and an addition follows when the sum has arrived.
//
// On the direct route every contribution leaves for its owner as soon as it is computed, while the contribution of rank
// r - s to the own gradient arrives. With options().apart each arrives in a place of its own, so that no hop waits for
// an addition, and one addition at the end reads and writes the own gradient once: 4 (R - 1) + 8 bytes of memory
// traffic for each float32 value. Otherwise those of a group are added after the next wgrad, before others arrive in
// their places: up to 12 bytes for each. The order is fixed: those of ranks r - 1, r - 2, ...
//
// With options().collective one scatter adds up the contributions of all ranks to all shards, and the own sum is copied
// home.
class GradientHops {
 public:
  explicit GradientHops(Builder& builder) : builder_(builder), groups_(builder, +1) {}

  // Computes the contributions to a group, and posts the hops that wait for nothing else. `weight`: as in Step.
  void start(int group, Buffer weight) {
    next_ = std::max(groups_.begin(group), 1), end_ = groups_.begin(group + 1);
    if (next_ == end_) return;
    if (fused()) return leave(weight);
    const int owners = groups_.shards(group);
    leaving_ = groups_.slot(builder_, Channel::gradient, group);
    builder_.compute(Compute::wgrad, owners > 1 ? groups_.owner(group) : builder_.at(next_), weight, kNoBuffer,
                     leaving_, Half::whole, owners);
    if (builder_.options().collective) {
      builder_.collective(Action::scatter, Channel::gradient, leaving_);
      next_ = end_;
      return;
    }
    if (group == 0) {
      builder_.local(Action::copy, Channel::gradient, builder_.at(0), leaving_, home());
      summed_ = true;
    }
    if (direct() && !builder_.options().apart && due_ < next_) land();
    leave();
    while (direct() && next_ < end_) leave();
  }
  // Posts the other hops of the newest group.
  void finish() {
    while (next_ < end_) leave();
  }
  // Computes the own gradient, if no group has. `weight`: the own one.
  void own(Buffer weight) {
    if (groups_.shards(0) > 1) return;
    Buffer in = summed_ ? home() : kNoBuffer;
    if (builder_.ranks() > 1 && !lands()) in = arriving(builder_.ranks() - 1);
    for (const Half half : fused() ? halves() : std::vector{Half::whole}) {
      builder_.compute(Compute::wgrad, builder_.at(0), weight, in, home(), half);
    }
    summed_ = true;
  }
  // Adds what has arrived and is not added yet.
  void land() {
    if (builder_.ranks() == 1 || !lands()) return;
    if (builder_.options().collective) {
      builder_.local(Action::copy, Channel::gradient, builder_.at(0), leaving_, home());
      return;
    }
    if (!direct()) due_ = next_ - 1;
    builder_.local(summed_ ? Action::add : Action::copy, Channel::gradient, builder_.at(0), arriving(due_), home(),
                   Half::whole, next_ - due_);
    due_ = next_;
    summed_ = true;
  }

 private:
  bool direct() const { return builder_.options().gradient_route == GradientRoute::direct; }
  // Whether wgrads add to the sums of the chain.
  bool fused() const {
    const ScheduleOptions& options = builder_.options();
    return !direct() && options.group == 1 && !(options.bundle && options.halves);
  }
  // Whether the last arrival is added to the own gradient; if not, the wgrad of that adds to it.
  bool lands() const { return !fused() || builder_.options().bundle || builder_.options().late; }
  std::vector<Half> halves() const {
    return builder_.options().halves ? std::vector{Half::first, Half::second} : std::vector{Half::whole};
  }

  // Posts the hops of the next shard.
  void leave(Buffer weight = kNoBuffer) {
    const int s = next_++;
    if (direct()) {
      builder_.hop(Channel::gradient, builder_.at(s), builder_.at(-s), builder_.at(s), builder_.at(0), leaving_,
                   arriving(s));
      return;
    }
    const Buffer arrived = s > 1 ? arriving(s - 1) : kNoBuffer;
    if (fused()) leaving_ = s > 1 ? arrived : slot(0);
    for (const Half half : halves()) {
      if (fused()) {
        builder_.compute(Compute::wgrad, builder_.at(s), weight, arrived, leaving_, half);
      } else if (s > 1) {
        builder_.local(Action::add, Channel::gradient, builder_.at(s), arrived, leaving_, half);
      }
      builder_.hop(Channel::gradient, builder_.at(-1), builder_.at(1), builder_.at(s), builder_.at(s + 1), leaving_,
                   arriving(s), half);
    }
  }

  // Where the hop of shard r + s arrives. Slots for arrivals follow those of groups.
  Buffer arriving(int s) {
    const int others = builder_.ranks() - 1;
    if (direct()) {
      const bool apart = builder_.options().apart;
      const int first = apart ? 1 : std::max(groups_.begin(groups_.of(s)), 1);
      return builder_.places(Channel::gradient, groups_.slots(),
                             apart ? others : std::min(builder_.options().group, others), s - first);
    }
    if (!fused()) return slot(groups_.slots() + (s - 1) % 2);
    return s == others && !builder_.options().receive_in_slots && !lands() ? home() : slot(s % 2);
  }
  Buffer home() const { return builder_.home(Channel::gradient); }
  Buffer slot(int index) {
    Buffer slot = builder_.slot(Channel::gradient, index);
    if (slot.halved()) slot.halves = Halves::apart;
    return slot;
  }

  Builder& builder_;
  Groups groups_;
  Buffer leaving_ = kNoBuffer;
  // The first step whose arrival is not added, the next one that leaves, and the first one of the next group.
  int due_ = 1, next_ = 1, end_ = 1;
  bool summed_ = false;  // whether the local tensor holds a sum
};

// dgrad(r) | wgrad(r+1) dgrad(r+1) | ... | wgrad(r), and dgrad before wgrad in a bundle; likewise group by group. A
// weight hop overlaps with a wgrad and a dgrad. Hops are enqueued in the order w1, g1, w2, g2, ...: with gradients
// first, a single communicator would deadlock.
void build_backward(Builder& builder) {
  const bool bundle = builder.options().bundle, wgrad = builder.options().wgrad;
  const bool dgrad = builder.options().dgrad || bundle;
  WeightRotation weights(builder, +1);
  GradientHops gradients(builder);
  if (dgrad) weights.fill(0);
  for (int group = 0; group < weights.groups(); ++group) {
    if (wgrad && !bundle) gradients.start(group, kNoBuffer);
    if (dgrad) {
      weights.fill(group + 1);
      weights.compute(Compute::dgrad, group);
    }
    gradients.finish();
    if (wgrad && bundle) gradients.start(group, weights.slot(group));
  }
  if (bundle) weights.copy_home();
  gradients.finish();
  if (wgrad) gradients.own(bundle ? weights.slot(0) : kNoBuffer);
  if (dgrad && !bundle) weights.copy_home();
  if (wgrad) gradients.land();
}

// Appends the accesses of a buffer by a step for the shards of `owners` owners from `owner` on.
void add_access(std::vector<Access>& accesses, const Step& step, Buffer buffer, int ranks, int owner, int owners = 1) {
  if (!buffer.exists()) return;
  for (int each = 0; each < (buffer.is_group() ? owners : 1); ++each) {
    const int place = buffer.is_group() ? buffer.place((owner + each) % ranks, ranks) : 0;
    if (!buffer.halved()) {
      accesses.push_back({buffer, place});
      continue;
    }
    for (const Half half : {Half::first, Half::second}) {
      if (step.half == Half::whole || step.half == half) accesses.push_back({buffer, place, half});
    }
  }
}

std::string shard_name(const Step& step, char letter, int owner) {
  const char* half = step.half == Half::whole ? "" : (step.half == Half::first ? "a" : "b");
  return concat(letter, owner, half);
}

}  // namespace

int Buffer::place(int owner, int ranks) const {
  if (at != kAnywhere) return at;
  const int wrapped = std::max(first + count - ranks, 0);
  return owner < wrapped ? owner : wrapped + owner - first;
}

Buffer Buffer::moved(int distance, int ranks) const {
  Buffer moved = *this;
  moved.first = ((first + distance) % ranks + ranks) % ranks;
  return moved;
}

Step Step::product(int index, int ranks) const {
  Step part = *this;
  if (owners == ranks) {
    part.owner = 0;
  } else if (products(ranks) == 2) {
    part.owners = index == 0 ? ranks - owner : owner + owners - ranks;
    if (index == 1) part.owner = 0;
  }
  return part;
}

std::vector<Step> Step::ranges(int ranks) const {
  std::vector<Step> ranges;
  for (int index = products(ranks); index-- > 0;) ranges.push_back(product(index, ranks));
  return ranges;
}

std::vector<Access> reads(const Step& step, int ranks) {
  std::vector<Access> accesses;
  if (step.action == Action::compute) {
    add_access(accesses, step, step.weight, ranks, step.owner, step.owners);
    add_access(accesses, step, step.gradient_in, ranks, step.owner, step.owners);
  } else if (step.action == Action::scatter) {
    add_access(accesses, step, step.send, ranks, 0, ranks);
  } else {
    for (int each = 0; each < step.count; ++each) {
      add_access(accesses, step, step.arrival(each), ranks, step.send_owner);
    }
    if (step.action == Action::add) add_access(accesses, step, step.receive, ranks, step.receive_owner);
  }
  return accesses;
}

std::vector<Access> writes(const Step& step, int ranks) {
  std::vector<Access> accesses;
  if (step.action == Action::compute) {
    add_access(accesses, step, step.gradient_out, ranks, step.owner, step.owners);
  } else if (step.action == Action::gather) {
    add_access(accesses, step, step.receive, ranks, step.receive_owner + 1, ranks - 1);
  } else {
    add_access(accesses, step, step.receive, ranks, step.receive_owner);
  }
  return accesses;
}

std::string label(const Step& step) {
  if (step.action == Action::compute) {
    const char letter = step.compute == Compute::wgrad ? 'G' : 'W';
    const char* sum = step.compute != Compute::wgrad ? "" : (step.gradient_in.exists() ? " +=" : " =");
    const std::string others = step.owners > 1 ? concat(" and ", step.owners - 1, " more") : "";
    return concat(name(step.compute), ' ', shard_name(step, letter, step.owner), others, sum);
  }
  const char letter = step.channel == Channel::weight ? 'W' : 'G';
  if (is_collective(step.action)) return concat(name(step.action), ' ', letter);
  if (step.action != Action::hop) {
    const std::string place = step.receive.is_home() ? "home" : concat("slot ", step.receive.slot);
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
  RTP_CHECK_VALUE(options.group >= 1, "schedule: expected a group of at least 1 shard, got ", options.group);
  Builder builder(ranks, rank, options);
  if (builder.options().route == Route::two_level) {
    build_two_level(builder);
  } else if (options.pass == Pass::forward) {
    build_forward(builder);
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
    case Action::gather:
      return "gather";
    case Action::scatter:
      return "scatter";
  }
  return "?";
}

}  // namespace rtp
