#include "schedule/schedule.h"

#include <optional>

#include "base/checks.h"
#include "schedule/builder.h"
#include "schedule/direct_gradients.h"
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
  // The first owner, in the order of owners.
  int owner(int group) const { return builder_.at(direction_ < 0 ? 1 - begin(group + 1) : begin(group)); }
  // The slot of a group; the slots alternate. A first group of one shard has none: its shard is at home.
  Buffer slot(Builder& builder, Channel channel, int group) const {
    const int alone = shards(0) == 1 ? 1 : 0;
    if (group < alone) return {channel, Buffer::kHome};
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

// The gradients of a backward in groups. A wgrad writes this rank's contributions to the gradients of a group; those to
// the own gradient go home at once. The others leave one by one: on the chain with the partial sum that has arrived
// from rank r + 1, else directly to their owners, while contributions of other ranks arrive.
class GroupGradients {
 public:
  explicit GroupGradients(Builder& builder) : builder_(builder), groups_(builder, +1) {}

  // Computes the contributions to a group and posts the hops that wait for nothing else. `weight`: as in Step.
  void start(int group, Buffer weight) {
    const int owners = groups_.shards(group);
    leaving_ = groups_.slot(builder_, Channel::gradient, group);
    builder_.compute(Compute::wgrad, owners > 1 ? groups_.owner(group) : builder_.at(groups_.begin(group)), weight,
                     kNoBuffer, leaving_, Half::whole, owners);
    if (group == 0 && owners > 1) builder_.local(Action::copy, Channel::gradient, builder_.at(0), leaving_, home());
    next_ = std::max(groups_.begin(group), 1), end_ = groups_.begin(group + 1);
    if (direct()) {
      for (int s = next_; s < end_; ++s) leave(s);
    } else if (next_ < end_) {
      leave(next_++);
    }
  }
  // Posts the other hops of the group, and adds to the own gradient what has arrived.
  void finish() {
    for (; next_ < end_; ++next_) direct() ? land(next_) : leave(next_);
    if (!direct() && end_ == builder_.ranks()) land(end_ - 1);
  }

 private:
  static Buffer home() { return {Channel::gradient, Buffer::kHome}; }
  bool direct() const { return builder_.options().gradient_route == GradientRoute::direct; }
  // Where the hop of shard r + s arrives: in slots after those of groups, on the direct route one with a place for
  // every contribution that arrives during a group.
  Buffer arriving(int s) {
    const int of_groups = std::min(groups_.count() - (groups_.shards(0) == 1 ? 1 : 0), 2);
    if (!direct()) return builder_.slot(Channel::gradient, of_groups + (s - 1) % 2);
    const int most = std::min(builder_.options().group, builder_.ranks() - 1);
    return builder_.places(Channel::gradient, of_groups, most, s - std::max(groups_.begin(groups_.of(s)), 1));
  }
  void leave(int s) {
    if (direct()) {
      builder_.hop(Channel::gradient, builder_.at(s), builder_.at(-s), builder_.at(s), builder_.at(0), leaving_,
                   arriving(s));
      return;
    }
    if (s > 1) builder_.local(Action::add, Channel::gradient, builder_.at(s), arriving(s - 1), leaving_);
    builder_.hop(Channel::gradient, builder_.at(-1), builder_.at(1), builder_.at(s), builder_.at(s + 1), leaving_,
                 arriving(s));
  }
  void land(int s) { builder_.local(Action::add, Channel::gradient, builder_.at(0), arriving(s), home()); }

  Builder& builder_;
  Groups groups_;
  Buffer leaving_ = kNoBuffer;
  int next_ = 0, end_ = 0;  // the steps of the newest group that are not finished
};

// dgrad and wgrad of one group after the other: a bundle needs the dgrad first; otherwise the gradients leave during
// the dgrad of their group.
void build_grouped_backward(Builder& builder) {
  const ScheduleOptions& options = builder.options();
  WeightRotation weights(builder, +1);
  GroupGradients gradients(builder);
  const bool dgrad = options.dgrad || options.bundle;
  if (dgrad) weights.fill(0);
  for (int group = 0; group < weights.groups(); ++group) {
    if (dgrad) weights.fill(group + 1);
    if (options.wgrad && !options.bundle) gradients.start(group, kNoBuffer);
    if (dgrad) weights.compute(Compute::dgrad, group);
    if (options.wgrad) gradients.finish();
    if (options.wgrad && options.bundle) gradients.start(group, weights.slot(group));
  }
  if (options.wgrad && options.bundle) gradients.finish();
}

// Appends the accesses of a buffer by a step for the shards of `owners` owners from `owner` on.
void add_access(std::vector<Access>& accesses, const Step& step, Buffer buffer, int ranks, int owner, int owners = 1) {
  if (!buffer.exists()) return;
  if (!buffer.is_group()) {
    const bool part_of_home = buffer.is_home() && step.half != Half::whole;
    accesses.push_back({buffer, part_of_home ? static_cast<int>(step.half) : Access::kAll});
    return;
  }
  for (int each = 0; each < owners; ++each) accesses.push_back({buffer, buffer.place((owner + each) % ranks, ranks)});
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
  } else {
    for (Buffer from = step.send; from.slot < step.send.slot + step.count; ++from.slot) {
      add_access(accesses, step, from, ranks, step.send_owner);
    }
    if (step.action == Action::add) add_access(accesses, step, step.receive, ranks, step.receive_owner);
  }
  return accesses;
}

std::vector<Access> writes(const Step& step, int ranks) {
  std::vector<Access> accesses;
  if (step.action == Action::compute) {
    add_access(accesses, step, step.gradient_out, ranks, step.owner, step.owners);
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
  } else if (builder.options().group > 1) {
    build_grouped_backward(builder);
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
