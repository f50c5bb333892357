#include "engine/prefetch.h"

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "engine/hops/shard_codes.h"

namespace rtp {
namespace {

// Nothing if it is not known.
std::optional<int64_t> version_of(const std::vector<c10::VariableVersion>& watched, size_t parameter) {
  return parameter < watched.size() ? std::optional<int64_t>(watched[parameter].current_version()) : std::nullopt;
}

void make_codes(const std::vector<ShardBundle::Coded>& codes, const std::vector<c10::VariableVersion>& watched) {
  for (const ShardBundle::Coded& each : codes) each.codes->refresh(version_of(watched, each.parameter));
}

}  // namespace

bool Prefetcher::Record::same(const Record& other) const {
  return serial != 0 && serial == other.serial && index == other.index && name == other.name &&
         schedule->options.same_hops(other.schedule->options);
}

void Prefetcher::enter(Context context) {
  context_ = std::move(context);
  index_ = 0;
  history().enter(context_.phase);
}

Prefetcher::Record Prefetcher::record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                                         const std::string& name) {
  Record record{context_.serial, index_++, &schedule, name, ring_.sizes(schedule, weight), {}, {}, {},
                context_.watched};
  if (!weight || schedule.moves.empty()) return record;
  record.layouts = weight->layouts;
  record.codes = weight->codes;
  for (const at::Tensor& local : weight->local) record.local.emplace_back(local);
  return record;
}

void Prefetcher::refresh(const std::vector<ShardBundle::Coded>& codes) {
  const auto current = [&](const ShardBundle::Coded& each) {
    return each.codes->current(version_of(context_.watched, each.parameter));
  };
  if (std::all_of(codes.begin(), codes.end(), current)) return;
  drain();
  make_codes(codes, context_.watched);
}

std::unique_ptr<PassWeights> Prefetcher::begin(const Schedule& schedule, std::optional<ShardBundle> weight,
                                               int64_t gradient, const std::string& name) {
  captured_ = captured_ || ring_.streams().capture() != 0;
  std::unique_ptr<PassWeights> weights;
  const auto fresh = [&](const WeightSizes& sizes) {
    return std::make_unique<PassWeights>(ring_, schedule, sizes, std::move(weight), name, sent_);
  };
  if (!look_ahead_.on() && pending_.empty()) return fresh(ring_.sizes(schedule, weight));
  const bool known = this->known();
  Record record = record_of(schedule, weight, name);
  if (!pending_.empty() && known && valid(pending_.front(), record)) {
    weights = std::move(pending_.front().weights);
    pending_.pop_front();
    used_ += weights->hops();
    if (weights->made() == 0) weights = fresh(record.sizes);
  } else {
    drain();
    weights = fresh(record.sizes);
  }
  if (known && history().size() == 0) {
    if (!context_.backward) turns_ = turned_;
    turned_ = context_.backward;
  }
  if (known) {
    look_ahead_.meet(schedule, record.sizes, gradient);
    history().add(std::move(record));
  } else {
    history().interrupt();
  }
  return weights;
}

Prefetcher::Upcoming Prefetcher::upcoming(size_t later) const {
  const PassHistory<Record>& now = histories_[context_.backward ? 1 : 0];
  Upcoming found{now.upcoming(context_.phase, later), std::nullopt};
  if (look_ahead_.bytes() > 0 && !context_.backward && turns_) {
    found.position = now.beyond(context_.phase, later);
    if (found.position) found.record = histories_[1].recorded(*found.position);
  }
  const bool possible = found.record != nullptr && !found.record->schedule->options.in_place;
  return possible ? found : Upcoming{};
}

void Prefetcher::look_ahead(PassWeights& current, const PassHandle& pass, int position) {
  if (!known() || captured_ || !history().expected(context_.phase) || current.schedule().options.in_place) return;
  const auto post_from = [&](PassWeights& weights) { weights.post_from(pass, position); };
  post_from(current);
  for (Pending& each : pending_) post_from(*each.weights);
  const auto next = [&](size_t later) {
    const Record* record = upcoming(later).record;
    return record ? std::pair(record->schedule, &record->sizes)
                  : std::pair<const Schedule*, const WeightSizes*>(nullptr, nullptr);
  };
  look_ahead_.run(current, position, pending_, next, [&](size_t later) {
    open(later);
    post_from(*pending_.back().weights);
  });
}

void Prefetcher::make(PassWeights& current, const PassHandle& pass, int position) {
  if (current.made(position)) return;
  current.post_from(pass, position);
  current.make(look_ahead_.time());
}

void Prefetcher::open(size_t later) {
  const Upcoming next = upcoming(later);
  const Record& record = *next.record;
  std::optional<ShardBundle> bundle;
  if (!record.layouts.empty()) {
    make_codes(record.codes, record.watched);
    bundle.emplace().layouts = record.layouts;
    bundle->codes = record.codes;
    for (size_t index = 0; index < record.local.size(); ++index) {
      at::Tensor local = record.local[index].lock();
      // If the memory has been freed, the pass will not run, but every rank must post the hop: its contents do not
      // matter.
      if (!local.defined()) local = record.local[index].like();
      bundle->local.push_back(std::move(local));
    }
  }
  auto weights =
      std::make_unique<PassWeights>(ring_, *record.schedule, record.sizes, std::move(bundle), record.name, sent_);
  pending_.push_back({std::move(weights), record, context_.phase, next.position, versions_of(record.watched),
                      ring_.streams().capture()});
}

bool Prefetcher::valid(const Pending& pending, const Record& record) const {
  if (pending.capture != ring_.streams().capture()) return false;
  if (pending.position) {
    if (!context_.backward || histories_[1].size() != *pending.position) return false;
  } else if (pending.phase != context_.phase) {
    return false;
  }
  if (!pending.record.same(record)) return false;
  if (pending.weights->made() == 0) return true;
  if (pending.record.local.size() != record.local.size()) return false;
  for (size_t index = 0; index < record.local.size(); ++index) {
    const at::Tensor local = record.local[index].lock();
    if (!local.defined() || !pending.record.local[index].is(local)) return false;
  }
  return versions_of(record.watched) == pending.versions;
}

void Prefetcher::drain() {
  if (pending_.empty()) return;
  for (; !pending_.empty(); pending_.pop_front()) {
    // The hops stay pending until they have ended: if one fails, its target memory must outlive the abort of the
    // transport.
    PassWeights& weights = *pending_.front().weights;
    const Schedule& schedule = weights.schedule();
    if (weights.made() == 0) {
      weights.give_back();  // a copy of the local shard, if memory ran out after it
      continue;
    }
    const Step& first = schedule.steps[static_cast<size_t>(schedule.moves.front())];
    const EventHandle waiting =
        ring_.sink.begin_outside(pending_.front().record.name, concat("unused: ", label(first)));
    weights.drain();
    ring_.sink.end(waiting);
  }
  ring_.pool.settle(Channel::weight);
}

void Prefetcher::forget() { pending_.clear(); }

}  // namespace rtp
