#include "engine/shards/sourced_weights.h"

#include <algorithm>

namespace rtp {

void ShardPulls::take_from(std::shared_ptr<ShardSource> source) {
  drop_ahead();
  source_ = std::move(source);
  pool_.clear();
  pool_.take_memory_from(source_ ? [source = source_](int64_t bytes) { return source->allocate(bytes); }
                                 : std::function<at::Tensor(int64_t)>());
}

void ShardPulls::enter(int64_t phase) {
  phase_ = phase;
  history_.enter(phase);
}

void ShardPulls::end_forward() {
  drop_ahead();
  if (source_) source_->end_forward();
}

std::optional<PulledShard> ShardPulls::begin(const SourcedPass& pass) {
  std::optional<PulledShard> shard;
  if (ahead_ && ahead_->phase == phase_ && ahead_->pass.same(pass)) {
    shard = std::exchange(ahead_, std::nullopt)->shard;
    ++used_;
  } else {
    drop_ahead();
  }
  phase_ != 0 ? history_.add(pass) : history_.interrupt();
  return shard;
}

PulledShard ShardPulls::start(const SourcedPass& pass, int owner) {
  PulledShard shard{owner, pool_.lease(Channel::weight, pass.stored.slot_bytes()), {}, nullptr};
  ++leased_;
  try {
    for (size_t index = 0; index < pass.stored.layouts.size(); ++index) {
      shard.places.push_back(pass.stored.in_slot(shard.slot->memory, {owner}, index));
    }
    shard.pull = source_->pull(pass.parameters, owner, shard.places);
  } catch (...) {
    give_back(std::move(shard));
    throw;
  }
  return shard;
}

void ShardPulls::pull_ahead() {
  if (ahead_) return;
  const SourcedPass* next = history_.upcoming(phase_);
  if (next == nullptr || next->first == kNoOwner) return;
  ahead_ = Ahead{start(*next, next->first), *next, phase_};
  ++started_;
}

void ShardPulls::drop(PulledShard shard) {
  shard.pull->drop();
  give_back(std::move(shard));
}

void ShardPulls::give_back(PulledShard shard) {
  shard.places.clear();
  --leased_;
  pool_.give_back(Channel::weight, std::move(shard.slot));
}

void ShardPulls::drop_ahead() {
  if (ahead_) drop(std::exchange(ahead_, std::nullopt)->shard);
}

void ShardPulls::end_pass() {
  if (phase_ == 0) end_forward();  // the end of an unknown forward is unknown, too
}

const std::vector<at::Tensor>& SourcedWeights::of(ShardPulls& pulls, const Schedule& schedule,
                                                  const ShardBundle& bundle, const Step& step) {
  const int owner = step.owner;
  if (owner_ == owner) return tensors_;
  owner_ = kNoOwner;
  tensors_.clear();
  if (!began_) begin(pulls, schedule, bundle, step);
  if (in_use_) pulls.give_back(*std::exchange(in_use_, std::nullopt));
  const ShardSource& source = *pulls.source();
  std::vector<at::Tensor> found;
  if (!source.maps(owner)) {
    found = arrived(pulls, owner);
  } else {
    for (size_t index = 0; index < bundle.layouts.size(); ++index) {
      const std::vector<int64_t> shape = bundle.layouts[index].wire_shape(owner);
      found.push_back(source.at(pass_.parameters[index], bundle.local[index], owner, shape));
    }
  }
  while (pulls.has_room() && !needed_.empty()) {
    coming_.push_back(pulls.start(pass_, needed_.front()));
    needed_.pop_front();
  }
  if (pulls.has_room() && needed_.empty()) pulls.pull_ahead();
  for (size_t index = 0; index < found.size(); ++index) {
    tensors_.push_back(found[index].to(bundle.layouts[index].wire_dtype()));
  }
  owner_ = owner;
  return tensors_;
}

void SourcedWeights::begin(ShardPulls& pulls, const Schedule& schedule, const ShardBundle& bundle, const Step& step) {
  began_ = true;
  const ShardSource& source = *pulls.source();
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    pass_.parameters.push_back(source.parameter_of(bundle.local[index]));
    pass_.stored.layouts.push_back(bundle.layouts[index]);
    TensorLayout& layout = pass_.stored.layouts.back();
    if (!layout.frozen) layout.dtype = bundle.local[index].scalar_type();
  }
  const auto pulled = [&](int owner) {
    return !source.maps(owner) && (expected_.empty() || expected_[static_cast<size_t>(owner)]);
  };
  for (const Step* next = &step; next != schedule.steps.data() + schedule.steps.size(); ++next) {
    if (pulled(next->owner)) needed_.push_back(next->owner);
  }
  if (!needed_.empty() && expected_.empty()) pass_.first = needed_.front();
  if (std::optional<PulledShard> shard = pulls.begin(pass_)) {
    needed_.pop_front();
    coming_.push_back(std::move(*shard));
  }
}

const std::vector<at::Tensor>& SourcedWeights::arrived(ShardPulls& pulls, int owner) {
  for (; !coming_.empty() && coming_.front().owner != owner; coming_.pop_front()) pulls.drop(coming_.front());
  if (coming_.empty()) {
    while (!needed_.empty() && needed_.front() != owner) needed_.pop_front();
    if (!needed_.empty()) needed_.pop_front();
    coming_.push_back(pulls.start(pass_, owner));
  }
  in_use_ = std::move(coming_.front());
  coming_.pop_front();
  in_use_->pull->wait();
  return in_use_->places;
}

void SourcedWeights::give_back(ShardPulls& pulls) {
  tensors_.clear();
  owner_ = kNoOwner;
  for (; !coming_.empty(); coming_.pop_front()) pulls.drop(std::move(coming_.front()));
  if (in_use_) pulls.drop(*std::exchange(in_use_, std::nullopt));
  if (std::exchange(began_, false)) pulls.end_pass();
}

}  // namespace rtp
