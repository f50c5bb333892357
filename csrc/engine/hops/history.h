// The order of passes, learned from one forward (or backward) for the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace rtp {

// The passes of one forward (or backward) of a model, which are expected in the order of the one before. `Record`
// describes a pass; `record.same(other)`: whether both are the same pass of two forwards.
template <typename Record>
class PassHistory {
 public:
  // Sets the phase of the following passes, which is shared by the passes of one forward; 0: unknown. Returns whether
  // it is another one.
  bool enter(int64_t phase) {
    if (phase == 0 || phase == phase_) return false;
    phase_ = phase;
    last_ = std::exchange(now_, {});
    matches_ = true;
    return true;
  }
  // Adds the pass that starts now.
  void add(Record record) {
    const size_t position = now_.size();
    matches_ = matches_ && position < last_.size() && last_[position].same(record);
    now_.push_back(std::move(record));
  }
  // A pass starts that belongs to no known forward: the rest of this one is not expected any more.
  void interrupt() { matches_ = false; }

  // Returns whether the passes of `phase` have been those of an earlier one so far.
  bool expected(int64_t phase) const { return matches_ && phase == phase_ && !last_.empty(); }
  // Returns the pass that is expected next in `phase`, or `later` passes after it; null if none is.
  const Record* upcoming(int64_t phase, size_t later = 0) const {
    if (!expected(phase) || now_.size() + later >= last_.size()) return nullptr;
    return &last_[now_.size() + later];
  }
  // Returns how many of `later` passes after the next one lie beyond the expected end of this phase; nothing if the
  // end is not expected, or later.
  std::optional<size_t> beyond(int64_t phase, size_t later) const {
    if (!expected(phase) || now_.size() + later < last_.size()) return std::nullopt;
    return now_.size() + later - last_.size();
  }
  // Returns a pass of the newest phase; null if it had fewer.
  const Record* recorded(size_t position) const { return position < now_.size() ? &now_[position] : nullptr; }
  // Returns how many passes are left of a phase that is expected.
  size_t remaining() const { return last_.size() - now_.size(); }
  // The passes of the newest phase, and of the one before.
  std::vector<Record>& newest() { return now_; }
  std::vector<Record>& previous() { return last_; }
  // Returns the number of passes of the newest phase.
  size_t size() const { return now_.size(); }

 private:
  int64_t phase_ = 0;
  std::vector<Record> last_, now_;
  bool matches_ = false;  // this phase equals the previous one so far
};

}  // namespace rtp
