// Sends shards of the following passes while a pass computes: see [Note: look-ahead].
//
// The prefetcher predicts passes from history: the passes of a forward (or backward) are expected in the order of the
// previous one. If more than slots that are left may be used, the first passes of a backward are expected after the
// last ones of a forward, if a backward followed the previous forward. Only facts that are equal on all ranks decide
// whether a hop is prefetched, so that either all ranks send it or none does.
//
// [Note: kept weights]
// A backward that computes a forward again needs the weights of the same layer twice. The forward then leaves them in
// its slots, and the backward takes them without a hop, where the backward before had both passes and the bytes fit.
// Both follow from the history, on all ranks; a write to the parameter between the two makes the weights travel again.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hops/history.h"
#include "engine/hops/pass_weights.h"
#include "engine/hops/slots.h"
#include "engine/hops/weak_tensor.h"

namespace rtp {

// The caller's description of the following passes.
struct Context {
  int64_t phase = 0;      // shared by the passes of one forward or backward of a model; 0: unknown
  bool backward = false;  // forward or backward
  int64_t serial = 0;     // id of the parameters, the same on every rank; 0: unknown
  // Version counters of the parameters, to detect writes. Holding the tensors themselves would prevent torch from
  // swapping parameters, which requires that no other reference exists.
  std::vector<c10::VariableVersion> watched;
};

class Prefetcher {
 public:
  explicit Prefetcher(RingParts ring) : ring_(std::move(ring)) {}

  // Sets how far ahead hops are posted, see LookAhead, and whether passes keep weights: see [Note: kept weights].
  void allow(bool on, std::optional<int64_t> bytes, bool keeps) { look_ahead_.allow(on, bytes), keeps_ = keeps; }
  void enter(Context context);
  // Makes the codes of the pass that starts now anew where their parameters have changed, after hops that may read the
  // old ones.
  void refresh(const std::vector<ShardBundle::Coded>& codes);
  const Context& context() const { return context_; }
  // Whether the user has captured a pass: its graph may run at any time, and uses the slots that the pass had.
  bool captured() const { return captured_; }

  // Registers the pass that starts now, and returns its weights. Some of their hops may have been prefetched. Drains
  // hops that were prefetched for another pass, or from parameters that have been written since. `gradient`: bytes of a
  // slot of gradients.
  std::unique_ptr<PassWeights> begin(const Schedule& schedule, std::optional<ShardBundle> weight, int64_t gradient,
                                     const std::string& name);
  // Posts what may be posted before the product at `position` of a pass.
  void look_ahead(PassWeights& current, const PassHandle& pass, int position);
  // Makes the move at `position` of the pass that runs, unless it was made ahead.
  void make(PassWeights& current, const PassHandle& pass, int position);
  bool empty() const { return pending_.empty(); }
  // The pass has ended: takes the weights that it keeps.
  void end(std::unique_ptr<PassWeights> weights);

  // Waits for the pending prefetched hops and returns their slots.
  void drain();
  // Drops them without waiting, for a failed ring.
  void forget();
  // Gives back what ended passes have kept.
  void drop_kept();

  int64_t sent() const { return sent_; }  // prefetched hops
  int64_t used() const { return used_; }  // prefetched hops that their pass used

 private:
  enum class Keeping : uint8_t { none, keeps, takes };
  struct Record {
    int64_t serial;
    int index;  // index among the passes of one call
    const Schedule* schedule;
    std::string name;
    WeightSizes sizes;
    std::vector<TensorLayout> layouts;
    std::vector<WeakTensor> local;
    std::vector<ShardBundle::Coded> codes;
    std::vector<c10::VariableVersion> watched;
    Keeping keeping = Keeping::none;

    bool same(const Record& other) const;
  };
  struct Pending {
    std::unique_ptr<PassWeights> weights;
    Record record;
    int64_t phase;                   // of the pass; not known yet if it is one of the next backward
    std::optional<size_t> position;  // in the next backward
    std::vector<int64_t> versions;
    uint64_t capture;
  };

  struct Kept {
    std::unique_ptr<PassWeights> weights;
    Record record;
    std::vector<int64_t> versions;
  };

  Record record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight, const std::string& name);
  PassHistory<Record>& history() { return histories_[context_.backward ? 1 : 0]; }
  // A pass that is expected, and its position if it is one of the next backward.
  struct Upcoming {
    const Record* record = nullptr;  // null: none
    std::optional<size_t> position;
  };
  Upcoming upcoming(size_t later) const;
  void open(size_t later);
  bool valid(const Pending& pending, const Record& record) const;
  void plan_kept(std::vector<Record>& passes) const;
  Keeping planned(const Record& record) const;
  static std::optional<KeptWeights> found(const Record& from, const Record& to);
  static WeightSizes sizes_of(const Record& record);

  bool known() const { return look_ahead_.on() && context_.phase != 0 && context_.serial != 0; }

  const RingParts ring_;
  LookAhead look_ahead_;
  // the user captures graphs: one may run between two passes and use the slots of a pending hop
  bool captured_ = false;
  Context context_;
  int index_ = 0;
  std::array<PassHistory<Record>, 2> histories_;  // of forwards and of backwards
  bool turned_ = false;                           // a backward has followed the newest forward
  int turns_ = 0;                // the number of forwards in a row before the newest one that a backward followed
  std::deque<Pending> pending_;  // the next passes, in order
  bool keeps_ = false;
  std::deque<Kept> kept_;
  std::map<const PassWeights*, Kept> keeping_;  // the passes that run and will keep their weights, one in another
  int64_t sent_ = 0;
  int64_t used_ = 0;
};

}  // namespace rtp
