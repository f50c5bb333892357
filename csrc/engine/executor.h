// Runs schedules. All events and waits are derived here from the last reads and writes of each buffer; operations never
// synchronize by hand.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/checks.h"
#include "base/ranges.h"
#include "base/signals.h"
#include "device/sm_carveout.h"
#include "engine/hops/dequantized_weights.h"
#include "engine/hops/gradient_quantizer.h"
#include "engine/hops/late_gradients.h"
#include "engine/hops/shard_codes.h"
#include "engine/hops/slots.h"
#include "engine/pass_graph.h"
#include "engine/prefetch.h"
#include "engine/results.h"
#include "engine/shards/sourced_weights.h"

namespace rtp {

// Runs the schedules of one ring: owns the slots and the sink of events, uses the transport, and records whether the
// ring has failed.
class Executor {
 public:
  // `hosts`: number of hosts of the ring, for route two_level.
  Executor(std::shared_ptr<Transport> transport, int rank, int ranks, at::Device device, int hosts = 1);
  ~Executor();

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  at::Device device() const { return device_; }
  // Where local shards lie.
  at::Device shard_device() const { return pulls_.source() ? pulls_.source()->device() : device_; }
  Transport& transport() { return *transport_; }
  Streams& streams() { return transport_->streams(); }
  SlotPool& pool() { return pool_; }
  Hops& hops() { return hops_; }
  Prefetcher& prefetcher() { return prefetcher_; }
  CodeCache& codes() { return codes_; }
  // Makes codes of the current pass anew where their parameters have changed.
  void refresh(const ShardBundle& weights) {
    or_fail([&] { prefetcher_.refresh(weights.codes); });
  }
  LateGradients& late_gradients() { return late_; }
  Sink& sink() { return sink_; }
  // Orders the compute stream after the last pass, which may have run on another one, and after hops in flight between
  // two passes: prefetched hops and late gradients.
  void drain() {
    or_fail([this] {
      streams().order_compute_after(last_);
      late_.drain(), prefetcher_.drain();
    });
  }
  // Frees all slots, after hops in flight.
  void clear_slots() {
    drain();
    prefetcher_.drop_kept();
    pool_.clear();
  }
  // Makes all forwards take shards from `source`, without a hop. Backwards become errors.
  void take_from(std::shared_ptr<ShardSource> source) { pulls_.take_from(std::move(source)); }
  ShardPulls& pulls() { return pulls_; }
  bool sourced() const { return pulls_.source() != nullptr; }
  // See Hops::meet. Hops between GPUs carry no token, and a rank alone has no neighbour to meet.
  void meet(const std::string& collective) {
    if (ranks_ == 1 || !streams().on_host() || transport_->loopback()) return;
    check_alive(collective);
    or_fail([&] { hops_.meet(collective, rank_, ranks_); });
  }
  // Sets the context of the following passes. A forward first finishes the late gradients that a failed backward
  // left.
  void enter(Context context) {
    if (!context.backward) or_fail([this] { late_.drain(); });
    pulls_.enter(context.phase);
    prefetcher_.enter(std::move(context));
  }
  // Finishes a late gradient: see Schedule::ends_late.
  void land(const at::Tensor& gradient);
  // Passes as CUDA graphs. After fix_slots(), the hops of a pass use the same slots whether the pass is enqueued step
  // by step or as a graph; hops must not cross pass boundaries then, neither by prefetching nor by deferring.
  Results& results() { return results_; }
  bool takes_graphs() const { return transport_->takes_graphs() && transport_->streams().has_graphs(); }
  void fix_slots();
  // A pass between these calls runs on a separate stream: see Streams. If `captured`, end_graph_stream() returns its
  // graph and the pass has not run.
  void begin_graph_stream(bool captured);
  std::shared_ptr<PassGraph> end_graph_stream(const std::string& operation);
  void abandon_graph_stream() noexcept;
  // Enqueues a captured pass. Its slots must not have changed since the capture.
  void replay(const PassGraph& pass);

  // Starts or stops the trace, after waiting for all hops in flight, so that passes are traced as a whole.
  void set_trace(bool on);

  // Returns the schedule of a pass. Schedules are cached; schedules() is their number.
  const Schedule& schedule(ScheduleOptions options);
  size_t schedules() const { return schedules_.size(); }
  // Returns how the transport can move the local tensors of a bundle.
  Movement movement(const ShardBundle& weights) const {
    return {weights.cast(), transport_->sends_anywhere(), transport_->receives_anywhere()};
  }

  // Throws RotationError if the ring was closed or has failed.
  void check_alive(const std::string& operation) const;
  bool alive() const { return end_.empty() && !forked(); }
  // Marks the ring as failed and aborts its transport. Returns text to append to the error: the path of the record
  // file.
  const std::string& fail(const std::string& reason) noexcept;
  void close();

 private:
  friend class Execution;

  // Returns whether this process was forked from the owner. The threads of the transport and of the source of shards do
  // not exist in a forked process, and their memory and connections belong to the owner.
  bool forked() const {
    const ShardSource* source = pulls_.source();
    return getpid() != owner_ && (source != nullptr ? !source->survives_fork() : !transport_->loopback());
  }
  // Runs `action`; an error of the transport, or of a signal's handler, marks the ring as failed and is rethrown.
  template <typename Action>
  void or_fail(Action&& action) {
    try {
      action();
    } catch (RotationError& error) {
      error.add(fail(error.what()));
      throw;
    } catch (const Interrupted&) {
      fail(Interrupted::kReason);
      throw;
    }
  }

  std::shared_ptr<Transport> transport_;
  const int owner_;  // process id
  int rank_;
  int ranks_;
  at::Device device_;
  int hosts_;
  SlotPool pool_;
  Sink sink_;
  Hops hops_;
  Prefetcher prefetcher_;
  LateGradients late_;
  ShardPulls pulls_;  // without a source, shards travel
  CodeCache codes_;
  Results results_;
  Hops::Counts counts_before_graph_;
  std::map<ScheduleOptions, Schedule> schedules_;
  std::string end_;   // why the ring is unusable; empty while it is usable
  StreamEvent last_;  // end of the newest pass on the compute stream
};

// One pass of one operation.
//
//   Execution pass(executor, schedule, weight, gradient, "linear forward");
//   while (const Step* step = pass.next()) { ... compute with pass.weight(), pass.gradient_out() ... }
//
// The views are valid until the next call of next(). The destructor always runs the remaining hops, so that the
// neighbours receive their data and weights that travel in place return to their owner.
class Execution {
 public:
  // `schedule` belongs to the executor.
  Execution(Executor& executor, const Schedule& schedule, std::optional<ShardBundle> weight,
            std::optional<ShardBundle> gradient, std::string operation);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution();

  // Runs up to the next compute and orders it after its dependencies. Returns null at the end.
  const Step* next();
  // Runs the remaining hops without computing; gradients that lack this rank's contribution become NaN before they
  // arrive at their owner. No effect after the end.
  void finish();

  // Makes a compute of a group whose owners wrap around one product, for operations to which their order is
  // indifferent. Its shards are those of the step's owners, modulo the ranks, in the order of a slot: see Step::ranges.
  void wrap_groups() { wraps_ = true; }
  // Sets the owners whose weights the pass will use, where it does not use all: shards without hops are then left out.
  void expect(std::vector<bool> owners) { sourced_.expect(std::move(owners)); }

  std::vector<at::Tensor> weight();             // in the compute dtype of its layouts, independent of the travel dtype
  std::vector<at::Tensor> gradient_in() const;  // empty if the sum starts from zero
  std::vector<at::Tensor> gradient_out() const;

 private:
  // key of a local gradient, or of a part of a slot of gradients: see Access
  using Key = std::tuple<int, int, Half>;

  const ShardBundle& gradient() const;
  Usage& usage(const Access& access);
  std::vector<Usage*> usages(const std::vector<Access>& accesses);
  void lease_slots();
  void return_slots();

  const std::shared_ptr<Slot>& slot(Buffer buffer) const { return slots_[static_cast<size_t>(buffer.slot)]; }
  std::vector<at::Tensor> views(Buffer buffer, int owner, Half half = Half::whole, int owners = 1) const;

  int position() const { return static_cast<int>(position_) - 1; }  // position of the current step
  // accesses of the current step
  const Schedule::Accesses& accesses() const { return schedule_.accesses[position_ - 1]; }
  void before_compute(const Step& step);
  void after_compute(const Step& step);
  void hop(const Step& step);
  // The views of a whole or, where the halves may lie apart, of both halves.
  std::vector<at::Tensor> pieces(Buffer buffer, int owner, Half half) const;
  // What a copying or adding step takes.
  std::vector<std::vector<at::Tensor>> arrivals(const Step& step) const;
  void copy_or_add(const Step& step);
  void leave_late(const Step& step);
  void end();
  template <typename Action>
  auto guarded(Action&& action);

  Executor& executor_;
  const Schedule& schedule_;
  std::unique_ptr<PassWeights> weights_;
  std::optional<ShardBundle> gradient_;
  std::string operation_;
  std::optional<StreamsPass> streams_pass_;
  std::optional<SmCarveout> carveout_;
  std::vector<std::shared_ptr<Slot>> slots_;    // of gradients
  std::optional<GradientQuantizer> quantizer_;  // set if contributions travel in fewer bits
  DequantizedWeights dequantized_;              // holds memory if weights travel in fewer bits
  SourcedWeights sourced_;                      // the shards in use, if they come from a source
  std::map<Key, Usage> usage_;
  StreamEvent start_;  // start of this pass on the caller's stream
  StreamEvent side_;   // newest compute on compute stream 1
  size_t position_ = 0;
  Step product_;  // the current compute, or the current one of its two products
  const Step* current_ = nullptr;
  int products_left_ = 0;
  bool wraps_ = false;
  bool ended_ = false;
  int gradient_hops_ = 0;  // posted so far
  PassHandle begun_;
  EventHandle computing_;
  Range range_, compute_range_;  // for profilers
};

// Runs `action`; an error of the transport, of a signal's handler, or of torch while neighbours wait for hops, marks
// the ring as failed and is rethrown. Where no neighbour waits, an error of torch ends the pass alone.
template <typename Action>
auto Execution::guarded(Action&& action) {
  const StreamsScope scope(executor_.streams());
  const auto leave = [this] {
    executor_.streams().select_compute_stream(0);
    carveout_.reset();
  };
  const auto fail = [&](const std::string& reason) -> const std::string& {
    ended_ = true;
    return executor_.fail(reason);
  };
  try {
    return action();
  } catch (RotationError& error) {
    leave();
    error.add(fail(error.what()));
    throw;
  } catch (const Interrupted&) {
    leave();
    fail(Interrupted::kReason);
    throw;
  } catch (c10::Error& error) {  // for example out of memory, perhaps only on this rank
    leave();
    if (!executor_.transport().loopback()) {  // the hops that neighbours have posted would wait for this rank
      error.add_context(fail(concat(operation_, ": ", error.what_without_backtrace())));
    } else if (position_ > 0) {
      end();
    }
    throw;
  }
}

}  // namespace rtp
