#include "engine/prefetch.h"

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "engine/hops/shard_codes.h"

namespace rtp {
namespace {

constexpr int64_t kSlotsOfPass = 4;

// Nothing if it is not known.
std::optional<int64_t> version_of(const std::vector<c10::VariableVersion>& watched, size_t parameter) {
  return parameter < watched.size() ? std::optional<int64_t>(watched[parameter].current_version()) : std::nullopt;
}

// The owners of each content of a schedule, as the first one and their number.
std::vector<std::pair<int, int>> owners_of_contents(const Schedule& schedule) {
  std::vector<std::pair<int, int>> owners(schedule.contents.size(), {kNoOwner, 0});
  for (const Step& step : schedule.steps) {
    if (step.action != Action::compute || step.weight.content < 0) continue;
    const bool all = step.owners == schedule.ranks;
    owners[static_cast<size_t>(step.weight.content)] = {all ? 0 : step.owner, step.owners};
  }
  return owners;
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
  if (!history().enter(context_.phase)) return;
  drop_kept();
  plan_kept(context_.backward ? histories_[1].previous() : histories_[1].newest());
}

// Decides which forwards among the passes of a backward keep their weights for which of its other passes.
void Prefetcher::plan_kept(std::vector<Record>& passes) const {
  std::map<std::pair<int64_t, int>, size_t> forwards;  // the newest one of each parameters
  std::vector<size_t> ends(passes.size(), 0);          // of what each keeps
  std::vector<int64_t> bytes(passes.size(), 0);
  for (size_t position = 0; position < passes.size(); ++position) {
    Record& record = passes[position];
    record.keeping = Keeping::none;
    const std::pair key{record.serial, record.index};
    if (record.schedule->options.pass == Pass::forward) {
      forwards[key] = position;
      continue;
    }
    const auto forward = forwards.find(key);
    if (!keeps_ || forward == forwards.end() || !found(passes[forward->second], record)) continue;
    const size_t begin = forward->second;
    const Record& from = passes[begin];
    ends[begin] = position;
    bytes[begin] = static_cast<int64_t>(from.schedule->contents.size()) * from.sizes.slot;
    forwards.erase(forward);
  }
  // beside those that are kept: what is ahead, and the slots of the pass that runs
  const int64_t most = ring_.transport->most_slots() - LookAhead::kMostSlots - kSlotsOfPass;
  int64_t kept = 0, slots = 0;
  for (size_t position = 0; position < passes.size(); ++position) {
    const auto contents = static_cast<int64_t>(passes[position].schedule->contents.size());
    if (passes[position].keeping == Keeping::takes) kept -= bytes[position], slots -= contents;
    if (ends[position] == 0 || kept + bytes[position] > look_ahead_.kept() || slots + contents > most) continue;
    kept += bytes[position], slots += contents;
    passes[position].keeping = Keeping::keeps;
    passes[ends[position]].keeping = Keeping::takes;
    bytes[ends[position]] = bytes[position];
  }
}

// Whether a pass finds its weights where another one has left them. The contents of both have the same shards.
std::optional<KeptWeights> Prefetcher::found(const Record& from, const Record& to) {
  const ScheduleOptions &first = from.schedule->options, &second = to.schedule->options;
  if (to.schedule->contents.empty() || first.in_place || second.in_place || first.sourced) return std::nullopt;
  KeptWeights found;
  const auto brought = owners_of_contents(*from.schedule);
  for (const auto& owners : owners_of_contents(*to.schedule)) {
    const auto content = std::find(brought.begin(), brought.end(), owners);
    if (content == brought.end()) return std::nullopt;
    found.contents.push_back(static_cast<int>(content - brought.begin()));
  }
  for (size_t tensor = 0; tensor < to.local.size(); ++tensor) {
    size_t of = 0;
    while (of < from.local.size() && !(from.local[of].is(to.local[tensor]) && from.layouts[of] == to.layouts[tensor])) {
      ++of;
    }
    if (of == from.local.size()) return std::nullopt;
    found.tensors.push_back(of);
  }
  return found;
}

// Of a pass that takes kept weights, which moves nothing: a copy of the local shard only for a product.
WeightSizes Prefetcher::sizes_of(const Record& record) {
  if (record.keeping != Keeping::takes) return record.sizes;
  WeightSizes sizes = record.sizes;
  sizes.kept = true;
  const std::vector<Step>& steps = record.schedule->steps;
  const bool multiplied = std::any_of(steps.begin(), steps.end(), [](const Step& step) {
    return step.action == Action::compute && step.weight.is_home();
  });
  if (!multiplied) sizes.staged = 0;
  return sizes;
}

// Returns what the plan has for the pass that starts now.
Prefetcher::Keeping Prefetcher::planned(const Record& record) const {
  const Record* expected = context_.backward && !captured_ ? histories_[1].upcoming(context_.phase) : nullptr;
  return expected != nullptr && expected->same(record) ? expected->keeping : Keeping::none;
}

void Prefetcher::end(std::unique_ptr<PassWeights> weights) {
  auto kept = keeping_.extract(weights.get());
  if (kept.empty()) return weights->give_back();  // another phase has begun
  kept.mapped().weights = std::move(weights);
  kept_.push_back(std::move(kept.mapped()));
}

void Prefetcher::drop_kept() {
  for (Kept& kept : kept_) kept.weights->give_back();
  kept_.clear(), keeping_.clear();
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
  for (const ShardBundle::Coded& each : codes) each.codes->expect_amax(version_of(context_.watched, each.parameter));
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
  record.keeping = known ? planned(record) : Keeping::none;
  if (!pending_.empty() && known && valid(pending_.front(), record)) {
    weights = std::move(pending_.front().weights);
    pending_.pop_front();
    used_ += weights->hops();
    if (weights->made() == 0 || weights->kept()) weights.reset();  // nothing was posted
  } else {
    drain();
  }
  if (!weights) {
    const auto left = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) {
      return kept.record.serial == record.serial && kept.record.index == record.index &&
             versions_of(kept.record.watched) == kept.versions;
    });
    const auto kept =
        left != kept_.end() && record.keeping == Keeping::takes ? found(left->record, record) : std::nullopt;
    weights = fresh(kept ? sizes_of(record) : record.sizes);
    if (kept) {
      weights->take(*left->weights, *kept);
      left->weights->give_back();
      kept_.erase(left);
    }
  }
  if (record.keeping == Keeping::keeps) {
    weights->keep();
    keeping_.insert_or_assign(weights.get(), Kept{nullptr, record, versions_of(record.watched)});
  }
  if (known && history().size() == 0) {
    if (!context_.backward) turns_ = turned_ ? turns_ + 1 : 0;
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
  if (look_ahead_.bytes() > 0 && !context_.backward && turns_ > 0) {
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
    return record ? std::pair(record->schedule, sizes_of(*record))
                  : std::pair<const Schedule*, WeightSizes>(nullptr, {});
  };
  look_ahead_.run(current, position, history().remaining(), turns_, pending_, next, [&](size_t later) {
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
      std::make_unique<PassWeights>(ring_, *record.schedule, sizes_of(record), std::move(bundle), record.name, sent_);
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
  if (pending.weights->made() == 0 || pending.weights->kept()) return true;
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
    if (weights.made() == 0 || weights.kept()) {
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

void Prefetcher::forget() { pending_.clear(), kept_.clear(); }

}  // namespace rtp
