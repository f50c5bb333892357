#include "schedule/footprint.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>

namespace rtp {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kPage = 4096;
constexpr int64_t kMailboxHeaders = 3;  // pages of a mailbox beside its entries
constexpr int kMostSteps = 16;          // steps until the slots are stable, at most

bool weight_hop(const Step& step) { return step.action == Action::hop && step.channel == Channel::weight; }

// Returns the numbers of a shard, of a chunk of its rows, or of a half of these.
int64_t numbers_of(std::vector<int64_t> shard, const Chunks& chunks, int64_t chunk, Half half = Half::whole) {
  if (shard.empty()) shard.push_back(1);
  if (chunks.count > 1) shard[0] = chunks.of(chunk, shard[0]).count;
  shard[0] = half_rows(half, shard[0]).count;
  return product(shard);
}

// How the shards of a pass travel. Frozen blocks travel as they are stored; those that turn are copied first.
Movement movement_of(const OperationFacts& operation, const StepSize& step, const ScheduleOptions& options) {
  Movement movement = step.movement;
  movement.cast = false;
  for (size_t place = 0; place < operation.parameters.size(); ++place) {
    if (!operation.travels(place, options.pass) || operation.parameters[place].frozen) continue;
    const bool turned = options.group > 1 && operation.turns(place);
    movement.cast = movement.cast || step.movement.cast || step.quantizes_weight(operation, place) || turned;
  }
  return movement;
}

// The options of a pass, as csrc/ops makes them.
ScheduleOptions pass_options(const OperationFacts& operation, const StepSize& step, const Chunks& chunks, Pass pass) {
  const bool forward = pass == Pass::forward, alone = chunks.count == 1;
  bool weights = false, gradients = false;
  for (size_t place = 0; place < operation.parameters.size(); ++place) {
    weights = weights || operation.travels(place, pass);
    gradients = gradients || operation.has_gradient(place);
  }
  ScheduleOptions options;
  options.pass = pass;
  const bool groups = alone && operation.takes_groups() && step.route != Route::two_level &&
                      !(step.ranks > 1 && quantizes(step.travel, step.compute_bytes));
  options.route = !groups && step.route == Route::gather ? Route::direct : step.route;
  options.group = groups ? step.group : 1;
  options.hosts = step.hosts;
  options.in_place = step.in_place && alone && weights && step.route != Route::gather && options.group == 1;
  options.in_place = options.in_place && movement_of(operation, step, options).in_place();
  options.dgrad = weights;
  options.wgrad = forward || gradients;
  options.bundle = operation.kind.bundle && !forward;
  options.halves = step.halves && !step.direct_gradients() && !forward;
  options.receive_in_slots = !forward && !step.movement.receives_anywhere;
  options.late = step.late > 0 && operation.late() && !forward && alone;
  options.gradient_route = step.gradient_route;
  options.narrow = step.narrow();
  options.apart = step.gradients_apart;
  return options;
}

// Represents slots by their sizes.
struct Sizes {
  int64_t allocate(int64_t bytes) const { return bytes; }
  void release(int64_t) const {}
  int64_t bytes(int64_t slot) const { return slot; }
  bool movable(int64_t) const { return true; }
  bool before(int64_t, int64_t) const { return false; }
};

// The memory of one pass: the slots that it leases, and those that it can return early.
struct PassSize {
  const Schedule* schedule;
  std::optional<int64_t> weight, gradient;  // bytes of a slot of one shard; none if nothing of the kind travels
  std::vector<int64_t> weights, gradients;  // bytes of every slot
  std::optional<int64_t> sum;  // bytes of the slot in which contributions are summed before they are rounded
  int64_t scratch;             // bytes of dequantized tensors
  bool staged;
  std::optional<FreedSlots> freed;

  bool prefetched() const {
    return weight && schedule->hops(Channel::weight) > 0 && !schedule->options.in_place && schedule->options.group == 1;
  }
};

// Runs the passes of a step on pools of sizes, like Execution and Prefetcher.
class Walk {
 public:
  Walk(const std::vector<OperationFacts>& operations, const StepSize& step) : step_(step) {
    for (const OperationFacts& operation : operations) {
      const Chunks chunks = operation.chunks(step.ranks, step.widest(), step.slot_cap);
      std::vector<PassSize> forward, backward;
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        forward.push_back(pass(operation, chunks, chunk, Pass::forward));
        backward.push_back(pass(operation, chunks, chunk, Pass::backward));
      }
      passes_[0].insert(passes_[0].end(), forward.begin(), forward.end());
      passes_[1].insert(passes_[1].begin(), backward.begin(), backward.end());
    }
  }

  // The first step records the order of the passes and the second one prefetches; the remaining slots are the start of
  // the next step, until a step leaves the pools as it found them.
  Footprint run() {
    for (int round = 0; round < kMostSteps; ++round) {
      const auto found = left();
      for (const size_t phase : {0, 1}) {
        for (size_t index = 0; index < passes_[phase].size(); ++index) {
          run(passes_[phase][index], [&]() { return round > 0 ? next(phase, index + 1) : nullptr; });
        }
        finish_all_but(0);
      }
      if (round > 0 && left() == found) break;
    }
    return {weights_.count(), gradients_.count(), scratch_.count(), weights_.free(), gradients_.free(), mailboxes()};
  }

 private:
  struct Held {
    std::vector<int64_t> slots;
    std::optional<int64_t> staged;
  };

  // The sizes of all slots between two steps.
  std::array<std::vector<int64_t>, 3> left() const {
    std::array<std::vector<int64_t>, 3> sizes{weights_.free(), gradients_.free(), scratch_.free()};
    for (std::vector<int64_t>& pool : sizes) std::sort(pool.begin(), pool.end());
    return sizes;
  }

  // Returns the bytes of a slot of `shards` with the parameters that travel, those with takes(place), where
  // bytes_of(place, numbers) is the size of one; none if none travels.
  template <typename Takes, typename Bytes>
  std::optional<int64_t> slot_bytes(const OperationFacts& operation, const Chunks& chunks, int64_t chunk, Takes&& takes,
                                    Bytes&& bytes_of, int shards = 1, bool halved = false) const {
    std::vector<int64_t> sizes;
    const Half half = halved && shards == 1 ? Half::first : Half::whole;
    for (size_t place = 0; place < operation.parameters.size(); ++place) {
      if (!takes(place)) continue;
      const int64_t numbers = numbers_of(operation.parameters[place].shard(step_.ranks, 0), chunks, chunk, half);
      sizes.push_back((half == Half::whole ? 1 : 2) * bytes_of(place, numbers));
    }
    if (sizes.empty()) return std::nullopt;
    return packed_bytes(sizes.size(), [&](size_t tensor) { return shards * sizes[tensor]; });
  }

  PassSize pass(const OperationFacts& operation, const Chunks& chunks, int64_t chunk, Pass kind) {
    PassSize pass{};
    const auto travels = [&](size_t place) { return operation.travels(place, kind); };
    const auto trained = [&](size_t place) { return operation.has_gradient(place); };
    const auto quantized = [&](size_t place) { return step_.quantizes_weight(operation, place); };
    const ScheduleOptions options = pass_options(operation, step_, chunks, kind);
    auto& known = schedules_[options];
    if (known.steps.empty()) known = make_schedule(step_.ranks, 0, options);
    pass.schedule = &known;
    const auto weight_bytes = [&](size_t place, int64_t numbers) {
      const TravelFormat travel = quantized(place) ? step_.travel : TravelFormat::plain;
      return travelling_bytes(numbers, operation.parameters[place].frozen, travel, step_.compute_bytes);
    };
    const auto gradient_bytes = [&](size_t, int64_t numbers) {
      return travel_bytes(numbers, step_.gradient_travel(), step_.reduce_bytes);
    };
    pass.weight = slot_bytes(operation, chunks, chunk, travels, weight_bytes);
    for (const int shards : pass.weight ? known.weight_slots : std::vector<int>()) {
      pass.weights.push_back(*slot_bytes(operation, chunks, chunk, travels, weight_bytes, shards));
    }
    pass.scratch = slot_bytes(operation, chunks, chunk, travels, [&](size_t place, int64_t numbers) {
                     const bool made = operation.parameters[place].frozen || quantized(place);
                     return made ? numbers * step_.compute_bytes : 0;
                   }).value_or(0);
    if (kind == Pass::backward) {
      pass.gradient = slot_bytes(operation, chunks, chunk, trained, gradient_bytes);
      for (const int shards : known.gradient_slots) {
        pass.gradients.push_back(
            *slot_bytes(operation, chunks, chunk, trained, gradient_bytes, shards, known.options.halves));
      }
    }
    if (known.options.narrow) {
      const auto sum_bytes = [&](size_t, int64_t numbers) { return numbers * step_.sum_bytes; };
      pass.sum = slot_bytes(operation, chunks, chunk, trained, sum_bytes, known.options.group);
    }
    for (const Step& hop : known.steps) {
      if (hop.action != Action::hop || hop.outer || step_.movement.receives_anywhere) continue;
      const int64_t bytes = hop.channel == Channel::weight ? *pass.weight : *pass.gradient;
      int64_t& most = small_[{hop.channel, hop.from}];
      most = std::max(most, std::min(bytes, kMostSmall));  // the last shard or half a gradient may be small
    }
    pass.staged = pass.weight && known.uses_home &&
                  movement_of(operation, step_, known.options).staged(known.hops(Channel::weight) > 0);
    for (size_t position = 0; position < known.steps.size() && !pass.freed; ++position) {
      if (known.steps[position].action == Action::compute) pass.freed = freed_before(known, position, pass.staged);
    }
    return pass;
  }

  // An entry begins anywhere in a page, and each has a header, which large messages use too.
  int64_t mailboxes() const {
    int64_t pages = 0;
    for (const auto& [sender, bytes] : small_) {
      pages += kMailboxDepth * ((bytes + kPage - 1) / kPage + 1) + kMailboxHeaders;
    }
    return pages * kPage;
  }

  // Leases slots of these sizes for the first hops of a pass or for all, and for the staged copy of a shard.
  void lease(Held& held, const PassSize& pass, size_t slots) {
    for (size_t slot = held.slots.size(); slot < slots; ++slot) {
      held.slots.push_back(weights_.lease(pass.weights[slot], Sizes{}));
    }
    if (pass.staged && !held.staged) held.staged = weights_.lease(*pass.weight, Sizes{});
  }

  void finish_all_but(int most) {
    for (; static_cast<int>(late_.size()) > most; late_.pop_front()) {
      for (const int64_t slot : late_.front()) gradients_.give_back(slot);
    }
  }

  // Returns the pass whose first hop can be prefetched before the pass at `index`, or those after it; null if none can.
  const PassSize* next(size_t phase, size_t index) const {
    if (static_cast<int>(ahead_.size()) >= step_.prefetched) return nullptr;
    index += ahead_.size();
    if (index >= passes_[phase].size() && phase == 0 && step_.prefetched > 1) {
      index -= passes_[0].size();
      phase = 1;
    }
    const bool exists = index < passes_[phase].size() && passes_[phase][index].prefetched();
    return exists ? &passes_[phase][index] : nullptr;
  }

  // `next`: returns the pass that is prefetched next; null if none is.
  template <typename Next>
  void run(const PassSize& pass, Next&& next) {
    Held held;
    if (!ahead_.empty()) {
      held = std::move(ahead_.front());
      ahead_.pop_front();
    }
    if (pass.weight) lease(held, pass, pass.weights.size());
    std::optional<int64_t> sum, scratch;
    if (pass.sum) sum = gradients_.lease(*pass.sum, Sizes{});
    if (pass.scratch > 0) scratch = scratch_.lease(pass.scratch, Sizes{});
    std::vector<int64_t> gradients;
    for (const int64_t bytes : pass.gradients) gradients.push_back(gradients_.lease(bytes, Sizes{}));
    if (next() != nullptr && pass.freed) {
      std::vector<bool> freed(held.slots.size(), false);
      for (const int slot : pass.freed->slots) freed[static_cast<size_t>(slot)] = true;
      std::vector<int64_t> kept;
      for (size_t slot = 0; slot < held.slots.size(); ++slot) {
        freed[slot] ? weights_.give_back(held.slots[slot]) : kept.push_back(held.slots[slot]);
      }
      held.slots = std::move(kept);
      if (pass.freed->staged && held.staged) weights_.give_back(*std::exchange(held.staged, std::nullopt));
      while (const PassSize* following = next()) {
        lease(ahead_.emplace_back(), *following, 1);
      }
    }
    if (sum) gradients_.give_back(*sum);
    if (scratch) scratch_.give_back(*scratch);
    if (held.staged) weights_.give_back(*held.staged);
    for (const int64_t slot : held.slots) weights_.give_back(slot);
    if (pass.schedule->ends_late()) {
      late_.push_back(std::move(gradients));
    } else {
      for (const int64_t slot : gradients) gradients_.give_back(slot);
    }
    finish_all_but(step_.late);
  }

  const StepSize& step_;
  std::map<ScheduleOptions, Schedule> schedules_;
  std::vector<PassSize> passes_[2];
  SlotLedger<int64_t> weights_, gradients_, scratch_;
  std::map<std::pair<Channel, int>, int64_t> small_;  // bytes of a small message from each sender, at most
  std::deque<Held> ahead_;                            // slots of the prefetched hops of the next passes
  std::deque<std::vector<int64_t>> late_;             // slots of passes whose reductions are late
};

}  // namespace

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::optional<FreedSlots> freed_before(const Schedule& schedule, size_t position, bool staged) {
  bool home = false;
  std::vector<bool> named(schedule.weight_slots.size(), false);
  for (; position < schedule.steps.size(); ++position) {
    const Step& step = schedule.steps[position];
    if (weight_hop(step)) return std::nullopt;
    for (const Buffer& buffer : {step.send, step.receive, step.weight}) {
      if (buffer.channel != Channel::weight || buffer.slot < Buffer::kHome) continue;
      if (buffer.is_home()) {
        home = true;
      } else {
        named[static_cast<size_t>(buffer.slot)] = true;
      }
    }
  }
  const bool staged_named = staged && home;
  if (std::count(named.begin(), named.end(), true) + (staged_named ? 1 : 0) > 1) return std::nullopt;
  FreedSlots freed{{}, staged && !home};
  for (size_t slot = 0; slot < named.size(); ++slot) {
    if (!named[slot]) freed.slots.push_back(static_cast<int>(slot));
  }
  return freed;
}

Footprint footprint(const std::vector<OperationFacts>& operations, const StepSize& step) {
  return Walk(operations, step).run();
}

std::vector<Sent> traffic(const OperationFacts& operation, const StepSize& step, int rank) {
  const Chunks chunks = operation.chunks(step.ranks, step.widest(), step.slot_cap);
  std::vector<Sent> sent(operation.parameters.size());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Schedule schedule = make_schedule(step.ranks, rank, pass_options(operation, step, chunks, pass));
    for (size_t place = 0; place < sent.size(); ++place) {
      const ParameterFacts& parameter = operation.parameters[place];
      const TravelFormat travel = step.quantizes_weight(operation, place) ? step.travel : TravelFormat::plain;
      std::vector<int64_t> shard = parameter.shape;
      const std::vector<int64_t> sizes = parameter.sizes(step.ranks);
      for (const Step& hop : schedule.steps) {
        const bool gradient = hop.channel == Channel::gradient;
        if (hop.action != Action::hop) continue;
        if (!(gradient ? operation.has_gradient(place) : operation.travels(place, pass))) continue;
        shard[parameter.dim] = sizes[static_cast<size_t>(hop.send_owner)];
        int64_t& total = gradient                ? sent[place].gradient
                         : pass == Pass::forward ? sent[place].forward
                                                 : sent[place].backward;
        for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
          const int64_t numbers = numbers_of(shard, chunks, chunk, hop.half);
          total += gradient ? travel_bytes(numbers, step.gradient_travel(), step.reduce_bytes)
                            : travelling_bytes(numbers, parameter.frozen, travel, step.compute_bytes);
        }
      }
    }
  }
  return sent;
}

}  // namespace rtp
