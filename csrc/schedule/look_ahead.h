// The weights of passes on their way through slots, and how far ahead of the products they may be. The engine moves
// them, the footprint counts them. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/schedule.h"

namespace rtp {

// What the weights of one pass take: bytes of a slot, and of the copy of the local shard that travels in its place (0:
// none does).
struct WeightSizes {
  int64_t slot = 0;
  int64_t staged = 0;
  bool kept = false;  // the pass makes no moves: its weights are in the slots of an earlier one
};

// The weights of one pass: the moves of its schedule that have been made, and the slots that it holds. A content gets a
// slot with its first move and leaves it after its last use, whenever its moves are made.
class WeightMoves {
 public:
  WeightMoves(const Schedule& schedule, WeightSizes sizes)
      : schedule_(&schedule),
        sizes_(sizes),
        held_(schedule.contents.size(), false),
        made_(sizes.kept ? schedule.moves.size() : 0) {}
  WeightMoves(const WeightMoves&) = delete;
  WeightMoves& operator=(const WeightMoves&) = delete;
  virtual ~WeightMoves() = default;

  const Schedule& schedule() const { return *schedule_; }
  size_t made() const { return made_; }
  bool kept() const { return sizes_.kept; }
  bool done() const { return made_ == schedule_->moves.size(); }
  bool made(int position) const { return made_ > 0 && schedule_->moves[made_ - 1] >= position; }

  // The number of slots that the next move leases, and that the first one of a pass does.
  int need() const {
    const int content = schedule_->steps[static_cast<size_t>(schedule_->moves[made_])].receive.content;
    const bool leases = content >= 0 && !held_[static_cast<size_t>(content)];
    return (leases ? 1 : 0) + (sizes_.staged > 0 && made_ == 0 && !staged_ ? 1 : 0);
  }
  static int first_need(const Schedule& schedule, const WeightSizes& sizes) {
    return schedule.moves.empty() || sizes.kept ? 0 : 1 + (sizes.staged > 0 ? 1 : 0);
  }
  // Returns whether the next move forwards to another slot what the newest one has brought, where that was made at
  // `time`: it would wait for the arrival.
  bool forwards(int64_t time) const {
    const Step& next = schedule_->steps[static_cast<size_t>(schedule_->moves[made_])];
    return newest_ == time && next.send.content >= 0 && next.send.content != next.receive.content;
  }
  // Makes the next move, at `time`.
  void make(int64_t time) {
    stage();
    newest_ = time;
    const int position = schedule_->moves[made_];
    const int content = schedule_->steps[static_cast<size_t>(position)].receive.content;
    if (content >= 0 && !held_[static_cast<size_t>(content)]) {
      lease(content, sizes_.slot);
      held_[static_cast<size_t>(content)] = true;
    }
    ++made_;
    move(position);
  }
  // Copies the local shard, if a copy travels.
  void stage() {
    if (sizes_.staged == 0 || staged_ || (made_ > 0 && !sizes_.kept)) return;
    staged_ = true;
    lease_staged(sizes_.staged);
  }
  // Ends the step at `position`: gives back what no later one uses; the copy of the local shard once all moves are
  // made, so that they need not wait until the next rank has taken it.
  void end_step(int position) {
    for (size_t content = 0; content < held_.size(); ++content) {
      if (held_[content] && !keeps_ && schedule_->contents[content].last_use <= position) drop(content);
    }
    if (staged_ && done() && schedule_->last_of_home <= position) drop_staged();
  }
  // Gives back everything.
  void give_back() {
    for (size_t content = 0; content < held_.size(); ++content) {
      if (held_[content]) drop(content);
    }
    if (staged_) drop_staged();
  }

  // The number of slots that are ahead of the product at `position`: no product up to it takes what they hold. A copy
  // of the local shard is ahead only until its pass begins (position >= 0).
  int ahead_of(int position) const {
    if (sizes_.kept) return 0;
    int ahead = staged_ && position < 0 ? 1 : 0;
    for (size_t content = 0; content < held_.size(); ++content) {
      if (held_[content] && schedule_->contents[content].first_product > position) ++ahead;
    }
    return ahead;
  }
  int64_t slots() const { return std::count(held_.begin(), held_.end(), true) + (staged_ ? 1 : 0); }

  // Keeps all contents until they are given back, or taken.
  void keep() { keeps_ = true; }
  bool keeps() const { return keeps_; }

 protected:
  // This pass takes its contents from another one, which loses one of its own.
  void take_all() { held_.assign(held_.size(), true); }
  void lose(int content) { held_[static_cast<size_t>(content)] = false; }
  // The pass begins with this schedule, which may differ in lanes from the one before.
  void take(const Schedule& schedule) { schedule_ = &schedule; }

 private:
  virtual void lease(int content, int64_t bytes) = 0;
  virtual void release(int content) = 0;
  virtual void lease_staged(int64_t bytes) = 0;
  virtual void release_staged() = 0;
  virtual void move(int position) = 0;

  void drop(size_t content) {
    held_[content] = false;
    release(static_cast<int>(content));
  }
  void drop_staged() {
    staged_ = false;
    release_staged();
  }

  const Schedule* schedule_;
  WeightSizes sizes_;
  std::vector<bool> held_;  // by content
  size_t made_ = 0;
  bool staged_ = false, keeps_ = false;
  int64_t newest_ = -1;  // time of the newest move
};

// [Note: look-ahead]
// Hops of weights are posted ahead of their products, in the order of use: those of the pass that runs, then those of
// the passes that follow, as long as what has been posted or has landed, and no product has taken, fits in a number of
// bytes, which all passes share. Each slot counts as the largest one, which it may become, so that the pool grows by no
// more. Beyond that, the first shard of the next pass may come into the slots that the pass before has left. A hop that
// forwards what another one brought is posted one product later at the earliest, so that posting waits no longer than
// the schedule does.
class LookAhead {
 public:
  // At most so many slots, which the transports can tell apart.
  static constexpr int kMostSlots = 32;
  // What the largest pass receives in a ring of two is half a block at most, and other hops wait for it.
  static constexpr int64_t kFewestSlots = 3;
  // After so many forwards in a row that a backward followed, one more is taken for certain: of pipelines, which have
  // others, few stages get so far, and they then waste few hops.
  static constexpr int kManyTurns = 8;

  // `bytes`: together with the slots of groups, and of contributions that arrive apart, of any pass so far; nothing:
  // what the largest pass so far receives, or kFewestSlots slots of one shard.
  void allow(bool on, std::optional<int64_t> bytes) { on_ = on, bytes_ = bytes; }
  bool on() const { return on_; }
  // Bytes of the weights that passes may keep for others: see [Note: kept weights].
  int64_t kept() const { return bytes_ ? bytes() : 2 * largest_; }
  int64_t bytes() const { return bytes_ ? std::max<int64_t>(*bytes_ - others_, 0) : largest_; }
  // A pass begins. `gradient`: bytes of a slot of gradients.
  void meet(const Schedule& schedule, const WeightSizes& sizes, int64_t gradient) {
    const auto contents = static_cast<int64_t>(schedule.contents.size());
    const int64_t slot = std::max(sizes.slot, sizes.staged);
    const int64_t received = contents + (sizes.staged > 0 ? 1 : 0);
    const int64_t fewest = schedule.options.group > 1 ? 1 : kFewestSlots;
    if (contents > 0) {
      received_ = std::max(received_, received * slot);
      largest_ = std::max({largest_, received_, fewest * slot});
    }
    slot_ = std::max(slot_, slot);
    int64_t others = schedule.options.apart ? static_cast<int64_t>(schedule.gradient_slots.size()) * gradient : 0;
    if (schedule.options.group > 1) others += static_cast<int64_t>(schedule.weight_slots.size()) * sizes.slot;
    others_ = std::max(others_, others);
  }
  int64_t time() const { return time_; }
  // Whether hops run further ahead after kManyTurns.
  bool waits_for_turns() const { return on_ && !bytes_ && largest_ > received_; }

  // Called before the product at `position` of `current`. `pending`: the passes that are ahead, in order, with their
  // `weights`. Beyond them, `next(count)` returns the schedule and sizes of the `count`-th pass after `current`, or
  // a null pointer where none is expected, and `open(count)` appends it to `pending`. The first `certain` of these
  // passes belong to this phase; the others follow only if a backward does. They do without the minimum of slots,
  // except after kManyTurns (`turns`: forwards in a row that a backward followed).
  template <typename Pending, typename Next, typename Open>
  void run(WeightMoves& current, int position, size_t certain, int turns, Pending& pending, Next&& next, Open&& open) {
    ++time_;
    if (!on_) return;
    int ahead = current.ahead_of(position);
    for (const auto& each : pending) ahead += each.weights->ahead_of(-1);
    int64_t most = bytes();
    const auto fits = [&](const Schedule& schedule, int need, bool other) {
      if (need == 0) return true;
      const bool left = other && ahead == 0 && current.done() && current.slots() <= 1;
      if (left && schedule.weight_slots.front() == 1) return true;
      return (ahead + need) * slot_ <= most && ahead + need <= kMostSlots;
    };
    const auto make_all = [&](WeightMoves& pass, bool other) {
      while (!pass.done()) {
        const int need = pass.need();
        if (pass.forwards(time_) || !fits(pass.schedule(), need, other)) return false;
        pass.make(time_);
        ahead += need;
      }
      return true;
    };
    if (!make_all(current, false)) return;
    for (size_t count = 0;; ++count) {
      if (count >= certain && turns < kManyTurns && !bytes_) most = received_;
      if (count == pending.size()) {
        const auto [schedule, sizes] = next(count);
        if (schedule == nullptr || !fits(*schedule, WeightMoves::first_need(*schedule, sizes), true)) return;
        open(count);
      }
      if (!make_all(*pending[count].weights, true)) return;
    }
  }

 private:
  bool on_ = false;
  std::optional<int64_t> bytes_ = 0;
  int64_t received_ = 0, largest_ = 0, others_ = 0, slot_ = 0;  // bytes: see bytes(); of the largest slot
  int64_t time_ = 0;
};

}  // namespace rtp
