#include "engine/prefetch.h"

#include <algorithm>

namespace rtp {

bool Prefetcher::Record::same(const Record& other) const {
  return serial != 0 && serial == other.serial && index == other.index && name == other.name &&
         options.same_hops(other.options);
}

Prefetcher::Prefetcher(std::shared_ptr<Transport> transport, SlotPool& pool, Hops& hops, Sink& sink, int rank)
    : transport_(std::move(transport)), pool_(pool), hops_(hops), sink_(sink), rank_(rank) {}

void Prefetcher::enter(Context context) {
  context_ = std::move(context);
  index_ = 0;
  history().enter(context_.phase);
}

Prefetcher::Record Prefetcher::record_of(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                                         const std::string& name) {
  Record record{context_.serial, index_++, schedule.options, name, Step{}, 0, schedule.hops(Channel::weight), {}, {},
                context_.watched};
  const auto first = std::find_if(schedule.steps.begin(), schedule.steps.end(), [](const Step& step) {
    return step.action == Action::hop && step.channel == Channel::weight;
  });
  if (!weight || first == schedule.steps.end() || schedule.options.in_place || first->receive.is_group()) return record;
  record.first_hop = *first;
  record.position = static_cast<int>(first - schedule.steps.begin());
  record.layouts = weight->layouts;
  for (const at::Tensor& local : weight->local) record.local.emplace_back(local);
  return record;
}

std::optional<PrefetchedHop> Prefetcher::begin(const Schedule& schedule, const std::optional<ShardBundle>& weight,
                                               const std::string& name) {
  captured_ = captured_ || transport_->streams().capture() != 0;
  if (allowed_ == 0 && pending_.empty()) return std::nullopt;
  const bool known = allowed_ > 0 && context_.phase != 0 && context_.serial != 0;
  Record record = record_of(schedule, weight, name);
  std::optional<PrefetchedHop> prefetched;
  if (!pending_.empty() && known && valid(pending_.front(), record)) {
    prefetched = std::move(pending_.front().prefetched);
    pending_.pop_front();
    ++used_;
  } else {
    drain();
  }
  if (known && history().size() == 0) {
    if (!context_.backward) turns_ = turned_;
    turned_ = context_.backward;
  }
  known ? history().add(std::move(record)) : history().interrupt();
  return prefetched;
}

Prefetcher::Upcoming Prefetcher::upcoming() const {
  if (captured_ || pending_.size() >= allowed_) return {};
  const PassHistory<Record>& now = histories_[context_.backward ? 1 : 0];
  Upcoming found{now.upcoming(context_.phase, pending_.size()), std::nullopt};
  if (allowed_ > 1 && !context_.backward && turns_) {
    found.position = now.beyond(context_.phase, pending_.size());
    if (found.position) found.record = histories_[1].recorded(*found.position);
  }
  const bool possible = found.record != nullptr && found.record->first_hop.receive.exists();
  return possible ? found : Upcoming{};
}

bool Prefetcher::expects() const { return upcoming().record != nullptr; }

void Prefetcher::prefetch(const PassHandle& pass, int position) {
  const Upcoming next = upcoming();
  Record record = *next.record;
  Transport& transport = *transport_;
  ShardBundle bundle{record.layouts, {}};
  bool cast = false, alive = true;
  for (size_t index = 0; index < record.local.size(); ++index) {
    bundle.local.push_back(record.local[index].lock());
    alive = alive && bundle.local.back().defined();
    cast = cast || record.layouts[index].casts(record.local[index].dtype());
  }
  // If the memory has been freed, the pass will not run, but every rank must post the hop: its contents do not matter.
  const bool stage = !alive || Movement{cast, transport.sends_anywhere()}.staged(true);

  Pending pending{
      {}, record, context_.phase, next.position, versions_of(record.watched), transport.streams().capture()};
  PrefetchedHop& prefetched = pending.prefetched;
  prefetched.landing = pool_.lease(Channel::weight, bundle.slot_bytes());
  if (stage) {
    prefetched.staged = pool_.lease(Channel::weight, bundle.slot_bytes());
    const EventHandle waiting = sink_.begin_slot(pass, position, label(record.first_hop));
    prefetched.staged->usage.wait_for_all(transport.streams());
    sink_.end(waiting);
    prefetched.traced.push_back(sink_.announce(record.name, TraceKind::stage, TraceEvent::kNoStep, record.first_hop));
    bundle.stage(transport.streams(), prefetched.staged->memory, rank_);
    sink_.end(prefetched.traced.back());
  }
  prefetched.local = bundle.local;
  transport.order_hops_after(Channel::weight, transport.streams().record_compute());
  const Step& step = record.first_hop;
  Hop hop = hop_of(step, record.options.route, record.name, 0, record.hops);
  hop.send = spans_of(bundle.local);
  std::vector<at::Tensor> landing;
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    landing.push_back(bundle.in_slot(prefetched.landing->memory, {step.receive_owner}, index));
    hop.remote_receive_offsets.push_back(static_cast<size_t>(bundle.offset({step.send_owner}, index)));
    hop.remote_send_offsets.push_back(static_cast<size_t>(bundle.offset({step.receive_owner}, index)));
  }
  hop.receive = spans_of(landing);
  hop.send_slot = prefetched.staged ? prefetched.staged->data() : nullptr;
  hop.receive_slot = prefetched.landing->data();
  prefetched.traced.push_back(sink_.announce(record.name, TraceKind::step, record.position, step));
  hops_.post(hop, prefetched.local_usage, prefetched.landing->usage, prefetched.traced.back(), pass, position);
  pending_.push_back(std::move(pending));
  ++sent_;
}

bool Prefetcher::valid(const Pending& pending, const Record& record) const {
  if (pending.capture != transport_->streams().capture()) return false;
  if (pending.position) {
    if (!context_.backward || histories_[1].size() != *pending.position) return false;
  } else if (pending.phase != context_.phase) {
    return false;
  }
  if (!pending.record.same(record)) return false;
  if (pending.record.local.size() != record.local.size()) return false;
  for (size_t index = 0; index < record.local.size(); ++index) {
    const at::Tensor local = record.local[index].lock();
    if (!local.defined() || !pending.record.local[index].is(local)) return false;
  }
  return versions_of(record.watched) == pending.versions;
}

void Prefetcher::drain() {
  while (!pending_.empty()) finish_front();
}

// The hop stays pending until it has ended: if it fails, its target memory must outlive the abort of the transport.
void Prefetcher::finish_front() {
  PrefetchedHop& prefetched = pending_.front().prefetched;
  const Record& record = pending_.front().record;
  const EventHandle waiting = sink_.begin_outside(record.name, concat("unused: ", label(record.first_hop)));
  prefetched.local_usage.wait_for_all(transport_->streams());
  for (const auto& slot : {prefetched.landing, prefetched.staged}) {
    if (!slot) continue;
    slot->usage.wait_for_all(transport_->streams());
    pool_.give_back(Channel::weight, slot);
  }
  sink_.end(waiting);
  pending_.pop_front();
}

void Prefetcher::forget() { pending_.clear(); }

}  // namespace rtp
