// The order of passes, learned from one forward (or backward) for the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace rtp {

// The passes of one forward (or backward) of a model, which are expected in the order of the one before. `Record`
// describes a pass; `record.same(other)`: whether both are the same pass of two forwards.
template <typename Record>
class PassHistory {
 public:
  // Sets the phase of the following passes, which is shared by the passes of one forward; 0: unknown.
  void enter(int64_t phase) {
    if (phase == 0 || phase == phase_) return;
    phase_ = phase;
    last_ = std::exchange(now_, {});
    matches_ = true;
  }
  // Adds the pass that starts now.
  void add(Record record) {
    const size_t position = now_.size();
    matches_ = matches_ && position < last_.size() && last_[position].same(record);
    now_.push_back(std::move(record));
  }
  // A pass starts that belongs to no known forward: the rest of this one is not expected any more.
  void interrupt() { matches_ = false; }

  // Returns the pass that is expected next in `phase`; null if none is.
  const Record* upcoming(int64_t phase) const {
    if (!matches_ || phase != phase_ || now_.size() >= last_.size()) return nullptr;
    return &last_[now_.size()];
  }

 private:
  int64_t phase_ = 0;
  std::vector<Record> last_, now_;
  bool matches_ = false;  // this phase equals the previous one so far
};

}  // namespace rtp
