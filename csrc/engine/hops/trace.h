// A trace of all streams over time. While it is off, it costs a branch. The Recorder of the most recent events is
// always on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "transport/transport.h"

namespace rtp {

enum class Lane : uint8_t { compute, side, weight, gradient, outer_weight, outer_gradient };

// Kind of an event: a step of a schedule; a wait of the compute stream for a hop (its arrival, its departure, or on CPU
// also its posting, which the caller does itself), for a pull, a slot, or a collective; a conversion: local tensors are
// copied, cast or quantized before they travel, or arrived ones dequantized.
enum class TraceKind : uint8_t { step, wait, stage };

const char* name(Lane lane);
const char* name(TraceKind kind);

// Passes and events while the trace is on.
struct TracePass {
  uint64_t recording;  // a pass may outlive the trace that it began in
  int number;
  std::string operation;
  ScheduleOptions options;
  Moment start, end;
};
struct TraceEvent {
  std::shared_ptr<TracePass> pass;  // null: a prefetched hop whose pass has not been traced
  std::string operation;
  int step;  // position in the schedule; for a wait, the waiting step; kNoStep at either end of a pass
  TraceKind kind;
  Lane lane;
  std::string label;
  Moment start, end;

  static constexpr int kNoStep = -1;
};

// Null if the trace is off.
using PassHandle = std::shared_ptr<TracePass>;
using EventHandle = std::shared_ptr<TraceEvent>;

class Trace {
 public:
  explicit Trace(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  bool on() const { return on_; }
  Recorder& recorder() { return recorder_; }
  // Starts a new trace with the current time as 0 s. Throws RotationError if the transport does not support timing.
  void start();
  void stop() { on_ = false; }

  // A pass begins. Passes captured into a CUDA graph are only counted, because they do not run.
  PassHandle begin_pass(const std::string& operation, const Schedule& schedule);
  void end_pass(const PassHandle& pass);
  // The Recorder entries of a pass and of its current compute.
  struct Recorded {
    uint64_t pass = 0, compute = 0;
  };
  PassHandle begin_pass(const std::string& operation, const Schedule& schedule, Recorded& recorded) {
    recorded.pass = recorder_.begin_pass(operation);
    return begin_pass(operation, schedule);
  }
  void end_pass(const PassHandle& pass, const Recorded& recorded) { recorder_.end(recorded.pass), end_pass(pass); }
  EventHandle begin_compute(const PassHandle& pass, int position, const Step& step, Recorded& recorded) {
    recorded.compute = recorder_.begin_compute(recorded.pass, step);
    return begin(pass, position, step);
  }
  void end_compute(const EventHandle& event, const Recorded& recorded) { recorder_.end(recorded.compute), end(event); }

  // Begins an event. Returns null for a null pass.
  EventHandle begin(const PassHandle& pass, TraceKind kind, int step, Lane lane, const std::string& label);
  EventHandle begin(const PassHandle& pass, int position, const Step& step);  // in the row of the step
  // Begins the event of a prefetched hop whose pass has not begun, or of the copy made for it.
  EventHandle announce(const std::string& operation, TraceKind kind, int position, const Step& hop);
  // Begins the event in which a step of `pass` posts `hop`. Null if the host does not post hops itself.
  EventHandle begin_posting(const PassHandle& pass, int position, const EventHandle& hop);
  // Begins the wait of a step for the earlier uses of a slot.
  EventHandle begin_slot(const PassHandle& pass, int position, const std::string& what);
  // Begins a wait that belongs to no pass.
  EventHandle begin_outside(const std::string& operation, const std::string& label);
  // Runs `work`, which the product that has begun needs, as an event before it: those of a row do not overlap. `label`:
  // returns the label. Does nothing else for a null product.
  template <typename Label, typename Work>
  void before_product(const EventHandle& product, TraceKind kind, Label&& label, Work&& work) {
    const EventHandle event = product ? begin(product->pass, kind, product->step, product->lane, label()) : nullptr;
    work();
    end(event);
    if (event) product->start = event->end;
  }
  // A collective of torch.distributed that the calling thread waits for; one at a time. Returns its Recorder entry.
  uint64_t begin_collective(const std::string& operation);
  void end_collective(uint64_t recorded);
  void end(const EventHandle& event);

  // Marks the departure of the event's hop; follow() returns a transfer that also records its arrival.
  void depart(const EventHandle& event, const Hop& hop);
  std::shared_ptr<Transfer> follow(const EventHandle& event, const Hop& hop, std::unique_ptr<Transfer> transfer);

  // Times are in seconds from the start; NaN: not ended. A hop starts when it was posted or, if later, when the earlier
  // hops of its channel had arrived.
  struct Pass {
    std::string operation;
    ScheduleOptions options;
    double start, end;
  };
  struct Event {
    int pass;  // number of the pass; -1: none
    std::string operation;
    int step;
    TraceKind kind;
    Lane lane;
    std::string label;
    double start, end;
    double posted;  // when a hop was posted; for other events, the start
  };
  struct Result {
    double zero;  // start time, in seconds of the host's steady clock
    int64_t captured;
    std::vector<Pass> passes;
    std::vector<Event> events;
  };
  // Returns and clears the recorded events. Events that have not ended are omitted; blocks until the GPU has reached
  // them.
  Result read();

 private:
  EventHandle add(const PassHandle& pass, const std::string& operation, TraceKind kind, int step, Lane lane,
                  const std::string& label);

  std::shared_ptr<Transport> transport_;
  Recorder recorder_;
  bool on_ = false;
  bool on_host_ = false;  // the host computes, posts hops and waits for them
  uint64_t recording_ = 0;
  HostClock::time_point host_zero_;
  Moment zero_;
  int64_t captured_ = 0;
  std::vector<PassHandle> passes_;
  std::vector<EventHandle> events_;
  EventHandle collective_;
};

}  // namespace rtp
