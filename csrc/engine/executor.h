// Runs any schedule. Every event and wait is derived here from who last read and wrote each buffer; operations never
// synchronise by hand.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/checks.h"
#include "base/ranges.h"
#include "engine/hops/deferred_reductions.h"
#include "engine/hops/dequantized_weights.h"
#include "engine/hops/gradient_quantizer.h"
#include "engine/hops/slots.h"
#include "engine/hops/trace.h"
#include "engine/pass_graph.h"
#include "engine/prefetch.h"
#include "engine/results.h"

namespace rtp {

// What one ring needs to run schedules: the transport, the slots, and whether it is still alive.
class Executor {
 public:
  // `hosts`: how many the ranks lie on, for route two_level.
  Executor(std::shared_ptr<Transport> transport, int rank, int ranks, at::Device device, int hosts = 1);
  ~Executor();

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  at::Device device() const { return device_; }
  Transport& transport() { return *transport_; }
  Streams& streams() { return transport_->streams(); }
  SlotPool& pool() { return pool_; }
  Hops& hops() { return hops_; }
  Prefetcher& prefetcher() { return prefetcher_; }
  DeferredReductions& deferred_reductions() { return deferred_; }
  Trace& trace() { return trace_; }
  // Waits for hops that are under way between two passes: what was sent ahead, and gradients that have yet to land.
  void drain() {
    or_fail([this] { deferred_.drain(), prefetcher_.drain(); });
  }
  // What the passes that follow belong to. What a backward that failed has left lands before a forward.
  void enter(Context context) {
    if (!context.backward) or_fail([this] { deferred_.drain(); });
    prefetcher_.enter(std::move(context));
  }
  // Finishes the reduction of a gradient that its pass did not wait for: see Schedule::defers_reduction.
  void finish_reduction(const at::Tensor& gradient);
  // Passes as graphs. Once fix_slots() was called, hops of a pass use the same slots whether it is enqueued step by
  // step or as a graph; nothing may then travel between passes, ahead or late.
  Results& results() { return results_; }
  bool takes_graphs() const { return transport_->takes_graphs() && transport_->streams().has_graphs(); }
  void fix_slots();
  // A pass that is run between these runs beside the caller's stream: see Lanes. Its graph, where it was `captured`; it
  // has not run then.
  void begin_aside(bool captured);
  std::shared_ptr<PassGraph> end_aside(const std::string& operation);
  void leave_aside() noexcept;
  // Enqueues a pass that was captured. Its slots must be the ones that there were then.
  void replay(const PassGraph& pass);

  // Starts or stops the recorder. What is under way is waited for first, so that passes are recorded whole.
  void set_trace(bool on);

  // The schedule of a pass. Each is made once; how many have been.
  const Schedule& schedule(ScheduleOptions options);
  size_t schedules() const { return schedules_.size(); }
  // Where the local tensors of a cargo may leave from and land.
  Travel travel(const ShardBundle& weights) const {
    return {weights.cast(), transport_->sends_anywhere(), transport_->receives_anywhere()};
  }

  // Throws RotationError when the ring was closed or has failed.
  void check_alive(const std::string& operation) const;
  bool alive() const { return end_.empty() && !forked(); }
  // Marks the ring dead and aborts its transport. Returns what to add to the reason: where the recorder has written.
  const std::string& fail(const std::string& reason) noexcept;
  void close();

 private:
  friend class Execution;

  // Whether this is a copy in a process forked from the owner: the transport's threads are not here, and its memory and
  // connections are still the owner's.
  bool forked() const { return getpid() != owner_ && !transport_->alone(); }
  // Runs `action`; an error of the transport kills the ring before it goes on to the caller.
  template <typename Action>
  void or_fail(Action&& action) {
    try {
      action();
    } catch (RotationError& error) {
      error.add(fail(error.what()));
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
  Trace trace_;
  Hops hops_;
  Prefetcher prefetcher_;
  DeferredReductions deferred_;
  Results results_;
  Hops::Counts before_aside_;
  std::map<ScheduleOptions, Schedule> schedules_;
  std::string end_;   // why the ring is no longer usable; empty while it is
  StreamEvent last_;  // the end of the newest execution on the compute lane
};

// One pass of one operation.
//
//   Execution pass(executor, schedule, weight, gradient, "linear forward");
//   while (const Step* step = pass.next()) { ... compute with pass.weight(), pass.gradient_out() ... }
//
// The views are valid until the next call of next(). Whatever happens, the remaining hops run, so that neighbours are
// served and weights that travel in place come home.
class Execution {
 public:
  // Weights whose local dtype differs from their part's, or that the transport cannot send from where they are, are
  // copied once, into one more slot, before they travel. `schedule`: of the executor.
  Execution(Executor& executor, const Schedule& schedule, std::optional<ShardBundle> weight,
            std::optional<ShardBundle> gradient, std::string operation);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution();

  // Runs up to the next compute and orders it after what it reads and overwrites. Null at the end.
  const Step* next();
  // Runs the remaining hops without computing; gradients that lack this rank's part become NaN on their way home.
  // Does nothing after the end.
  void finish();

  std::vector<at::Tensor> weight();             // in the dtype of its parts, whatever it travels in
  std::vector<at::Tensor> gradient_in() const;  // empty where the sum starts from zero
  std::vector<at::Tensor> gradient_out() const;

 private:
  using Key = std::tuple<Channel, int, int>;  // of a local tensor, or of the slot that holds every shard: see Access

  const ShardBundle& bundle(Channel channel, Half half = Half::whole) const;
  Usage& usage(const Access& access);
  void lease_slots();
  void give_back(std::shared_ptr<Slot>& slot, Channel channel);
  void return_slots();
  void stage_local();
  void adopt(Ahead ahead);
  void send_ahead();

  const std::shared_ptr<Slot>& slot(Buffer buffer) const;
  std::byte* slot_start(Buffer buffer) const;  // null for a local tensor that stayed where it is
  size_t offset(Buffer buffer, Half half, int owner, size_t part) const;
  std::vector<at::Tensor> views(Buffer buffer, int owner, Half half = Half::whole) const;

  int position() const { return static_cast<int>(position_) - 1; }  // of the step that is being run
  const Schedule::Accesses& accesses() const { return schedule_.accesses[position_ - 1]; }  // its own
  void before_compute(const Step& step);
  void after_compute(const Step& step);
  void hop(const Step& step);
  void copy_or_add(const Step& step);
  void defer_reduction(const Step& step);
  void end();
  template <typename Action>
  auto guarded(Action&& action);

  Executor& executor_;
  const Schedule& schedule_;
  std::optional<ShardBundle> weight_;
  std::array<std::optional<ShardBundle>, 3> gradient_;  // all rows, and its halves where it travels so
  std::string operation_;
  std::optional<StreamsPass> streams_pass_;
  std::array<std::vector<std::shared_ptr<Slot>>, 2> slots_;
  std::array<std::shared_ptr<Slot>, 2> whole_;  // of each channel, the slot that holds every shard
  std::shared_ptr<Slot> staged_;                // holds a copy of the local tensors, where one travels
  std::optional<GradientQuantizer> quantizer_;  // where contributions travel in fewer bits
  DequantizedWeights dequantized_;              // and weights
  std::map<Key, Usage> usage_;
  StreamEvent start_;   // of this pass on the caller's lane
  StreamEvent side_;    // the newest compute on lane 1
  bool ahead_ = false;  // the first hop was sent before this pass began
  size_t position_ = 0;
  const Step* current_ = nullptr;  // the compute that the caller is at
  bool ended_ = false;
  std::array<int, 2> hop_index_{};
  PassHandle traced_;  // null: nobody traces this pass
  Trace::Recorded recorded_;
  EventHandle computing_;
  Range range_, compute_range_;  // for profilers
};

// Runs `action`; an error of the transport, or of torch where others wait, kills the ring before it goes on to the
// caller.
template <typename Action>
auto Execution::guarded(Action&& action) {
  const StreamsScope scope(executor_.streams());
  try {
    return action();
  } catch (RotationError& error) {
    executor_.streams().select_compute_stream(0);
    error.add(executor_.fail(error.what()));
    ended_ = true;
    throw;
  } catch (c10::Error& error) {  // memory ran out, perhaps on this rank alone
    executor_.streams().select_compute_stream(0);
    if (!executor_.transport().alone()) {  // what its neighbours have posted would wait for it
      error.add_context(executor_.fail(concat(operation_, ": ", error.what_without_backtrace())));
      ended_ = true;
    }
    throw;
  }
}

}  // namespace rtp
