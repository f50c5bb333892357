#include "schedule/footprint.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "schedule/look_ahead.h"

namespace rtp {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kPage = 4096;
constexpr int64_t kMailboxHeaders = 3;  // pages of a mailbox beside its entries
constexpr int kMostSteps = 16;          // steps until the slots are stable, at most

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
    const ParameterFacts& parameter = operation.parameters[place];
    if (!operation.travels(place, options.pass) || parameter.frozen || parameter.codes) continue;
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
  const bool groups = alone && operation.takes_groups(pass) && step.route != Route::two_level &&
                      !(step.ranks > 1 && quantizes(step.travel, step.compute_bytes));
  options.route = !groups && step.route == Route::gather ? Route::direct : step.route;
  options.group = groups ? step.group : 1;
  options.hosts = step.hosts;
  options.in_place = step.in_place && alone && weights && step.route != Route::gather && options.group == 1;
  options.in_place = options.in_place && movement_of(operation, step, options).in_place();
  options.dgrad = weights;
  options.wgrad = forward || gradients;
  options.bundle = operation.kind.bundle && !forward;
  const bool takes_halves = operation.kind.bundle || !operation.in_codes();
  options.halves = step.halves && !step.direct_gradients() && !forward && takes_halves;
  options.receive_in_slots = !forward && !step.movement.receives_anywhere;
  options.late = step.late > 0 && operation.late() && !forward && alone;
  options.gradient_route = step.gradient_route;
  options.narrow = step.narrow();
  options.apart = step.gradients_apart;
  options.collective = groups && step.collective;
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

// The memory of one pass.
struct PassSize {
  const Schedule* schedule;
  std::optional<int64_t> weight, gradient;  // bytes of a slot of one shard; none if nothing of the kind travels
  WeightSizes weights;
  std::vector<int64_t> gradients;  // bytes of every slot
  std::optional<int64_t> sum;      // bytes of the slot in which contributions are summed before they are rounded
  int64_t scratch;                 // bytes of dequantized tensors
};

// The weights of one pass in slots that are sizes.
class SizedWeights : public WeightMoves {
 public:
  SizedWeights(SlotLedger<int64_t>& slots, const PassSize& pass)
      : WeightMoves(*pass.schedule, pass.weights), slots_(slots), contents_(pass.schedule->contents.size()) {}

 private:
  void lease(int content, int64_t bytes) override {
    contents_[static_cast<size_t>(content)] = slots_.lease(bytes, Sizes{});
  }
  void release(int content) override { slots_.give_back(contents_[static_cast<size_t>(content)]); }
  void lease_staged(int64_t bytes) override { staged_ = slots_.lease(bytes, Sizes{}); }
  void release_staged() override { slots_.give_back(staged_); }
  void move(int) override {}

  SlotLedger<int64_t>& slots_;
  std::vector<int64_t> contents_;
  int64_t staged_ = 0;
};

// Runs the passes of a step on pools of sizes, like Execution.
class Walk {
 public:
  Walk(const std::vector<OperationFacts>& operations, const StepSize& step) : step_(step) {
    look_ahead_.allow(step.prefetch && step.ranks > 1, step.look_ahead);
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
  // the next step, until a step leaves the pools as it found them. After many steps hops may run further ahead, with
  // the slots that are there.
  Footprint run() {
    for (int round = 0, most = kMostSteps; round < most; ++round) {
      const auto found = left();
      for (const size_t phase : {0, 1}) {
        for (size_t index = 0; index < passes_[phase].size(); ++index) {
          const size_t certain = passes_[phase].size() - index - 1;
          run(passes_[phase][index], round > 0, certain, [&](size_t ahead) { return next(phase, index + 1 + ahead); });
        }
        finish_all_but(0);
      }
      if (round == 0 || left() != found) continue;
      if (turns_ == LookAhead::kManyTurns || !look_ahead_.waits_for_turns()) break;
      turns_ = LookAhead::kManyTurns, most = round + kMostSteps;
    }
    return {weights_.count(), gradients_.count(), scratch_.count(), weights_.free(), gradients_.free(), mailboxes()};
  }

 private:
  struct Ahead {
    std::unique_ptr<SizedWeights> weights;
  };

  // The sizes of all slots between two steps.
  std::array<std::vector<int64_t>, 3> left() const {
    std::array<std::vector<int64_t>, 3> sizes{weights_.free(), gradients_.free(), scratch_.free()};
    for (std::vector<int64_t>& pool : sizes) std::sort(pool.begin(), pool.end());
    return sizes;
  }

  // Returns the bytes of a slot of `shards` with the parameters that travel, those with takes(place), where
  // bytes_of(place, numbers) is the size of one; none if none travels. `weights`: in which pass weights travel, of
  // which some are codes and scales.
  template <typename Takes, typename Bytes>
  std::optional<int64_t> slot_bytes(const OperationFacts& operation, const Chunks& chunks, int64_t chunk, Takes&& takes,
                                    Bytes&& bytes_of, int shards = 1, bool halved = false,
                                    std::optional<Pass> weights = std::nullopt) const {
    std::vector<int64_t> sizes;
    const Half half = halved && shards == 1 ? Half::first : Half::whole;
    for (size_t place = 0; place < operation.parameters.size(); ++place) {
      if (!takes(place)) continue;
      const std::vector<int64_t> shard = operation.parameters[place].shard(step_.ranks, 0);
      if (weights && operation.parameters[place].codes) {
        const int64_t codes = product(shard);
        sizes.push_back(codes);
        sizes.push_back(operation.parameters[place].coded_bytes(*weights, shard) - codes);
        continue;
      }
      const int64_t numbers = numbers_of(shard, chunks, chunk, half);
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
    pass.weight = slot_bytes(operation, chunks, chunk, travels, weight_bytes, 1, false, kind);
    if (pass.weight && !known.weight_slots.empty()) {
      pass.weights.slot =
          *slot_bytes(operation, chunks, chunk, travels, weight_bytes, known.weight_slots.front(), false, kind);
    }
    const bool stages = pass.weight && known.uses_home &&
                        movement_of(operation, step_, known.options).staged(known.hops(Channel::weight) > 0);
    pass.weights.staged = stages ? *pass.weight : 0;
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

  void finish_all_but(int most) {
    for (; static_cast<int>(late_.size()) > most; late_.pop_front()) {
      for (const int64_t slot : late_.front()) gradients_.give_back(slot);
    }
  }

  // Returns the pass at `index` of a phase, or of the backward after a forward; null if there is none.
  const PassSize* next(size_t phase, size_t index) const {
    if (index >= passes_[phase].size() && phase == 0 && look_ahead_.bytes() > 0) {
      index -= passes_[0].size();
      phase = 1;
    }
    const bool exists = index < passes_[phase].size() && !passes_[phase][index].schedule->options.in_place;
    return exists ? &passes_[phase][index] : nullptr;
  }

  // `expected`: hops are posted ahead. `next(ahead)`: returns the pass that comes `ahead` passes after the next one;
  // null if there is none. `certain`: see LookAhead.
  template <typename Next>
  void run(const PassSize& pass, bool expected, size_t certain, Next&& next) {
    std::unique_ptr<SizedWeights> weights;
    if (ahead_.empty()) {
      weights = std::make_unique<SizedWeights>(weights_, pass);
    } else {
      weights = std::move(ahead_.front().weights);
      ahead_.pop_front();
    }
    look_ahead_.meet(*pass.schedule, pass.weights, pass.gradient.value_or(0));
    weights->stage();
    std::optional<int64_t> sum, scratch;
    if (pass.sum) sum = gradients_.lease(*pass.sum, Sizes{});
    if (pass.scratch > 0) scratch = scratch_.lease(pass.scratch, Sizes{});
    std::vector<int64_t> gradients;
    for (const int64_t bytes : pass.gradients) gradients.push_back(gradients_.lease(bytes, Sizes{}));
    const std::vector<Step>& steps = pass.schedule->steps;
    for (int position = 0; position < static_cast<int>(steps.size()); ++position) {
      const Step& step = steps[static_cast<size_t>(position)];
      if (step.action == Action::compute && expected && !pass.schedule->options.in_place) {
        const auto sizes = [&](size_t count) {
          const PassSize* found = next(count);
          return found ? std::pair(found->schedule, found->weights)
                       : std::pair<const Schedule*, WeightSizes>(nullptr, {});
        };
        const auto open = [&](size_t count) {
          ahead_.push_back({std::make_unique<SizedWeights>(weights_, *next(count))});
        };
        look_ahead_.run(*weights, position, certain, turns_, ahead_, sizes, open);
      } else if (step.action != Action::compute && step.channel == Channel::weight && !weights->made(position)) {
        weights->make(look_ahead_.time());
      }
      weights->end_step(position);
    }
    if (sum) gradients_.give_back(*sum);
    if (scratch) scratch_.give_back(*scratch);
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
  LookAhead look_ahead_;
  int turns_ = 0;
  std::deque<Ahead> ahead_;                // the next passes, as far as they are ahead
  std::deque<std::vector<int64_t>> late_;  // slots of passes whose reductions are late
};

}  // namespace

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

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
      std::vector<int64_t> shard = parameter.shape, largest = parameter.shard(step.ranks, 0);
      const std::vector<int64_t> sizes = parameter.sizes(step.ranks);
      for (const Step& hop : schedule.steps) {
        const bool gradient = hop.channel == Channel::gradient, collective = is_collective(hop.action);
        if (!hop.travels()) continue;
        if (!(gradient ? operation.has_gradient(place) : operation.travels(place, pass))) continue;
        // a collective sends as much of every shard as the largest has, to all other ranks
        shard[parameter.dim] = collective ? sizes[0] * (step.ranks - 1) : sizes[static_cast<size_t>(hop.send_owner)];
        int64_t& total = gradient                ? sent[place].gradient
                         : pass == Pass::forward ? sent[place].forward
                                                 : sent[place].backward;
        for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
          const int64_t numbers = numbers_of(shard, chunks, chunk, hop.half);
          total += gradient ? travel_bytes(numbers, step.gradient_travel(), step.reduce_bytes)
                   : parameter.codes
                       ? (collective ? step.ranks - 1 : 1) * parameter.coded_bytes(pass, collective ? largest : shard)
                       : travelling_bytes(numbers, parameter.frozen, travel, step.compute_bytes);
        }
      }
    }
  }
  return sent;
}

}  // namespace rtp
