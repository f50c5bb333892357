// A recorder of what every lane did when. Off, it costs a branch; the one of what was done last is never off.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "transport/transport.h"

namespace rtp {

enum class Lane : uint8_t { compute, side, weight, gradient, outer_weight, outer_gradient };

// What an event is: a step of a schedule; the compute lane waiting for a hop (its arrival, its departure, or on CPU
// also its posting, which the caller does itself); a copy of local tensors that is made before they travel.
enum class TraceKind : uint8_t { step, wait, stage };

const char* name(Lane lane);
const char* name(TraceKind kind);

// While they are recorded.
struct TracePass {
  uint64_t recording;  // a pass may outlive the one that it began in
  int number;
  std::string operation;
  ScheduleOptions options;
  Moment start, end;
};
struct TraceEvent {
  std::shared_ptr<TracePass> pass;  // null: a hop that was sent ahead, and for which no recorded pass has come
  std::string operation;
  int step;  // position in the schedule; for a wait, that of the step that waited; kNoStep at either end of a pass
  TraceKind kind;
  Lane lane;
  std::string label;
  Moment start, end;

  static constexpr int kNoStep = -1;
};

// Null: nothing is recorded.
using PassHandle = std::shared_ptr<TracePass>;
using EventHandle = std::shared_ptr<TraceEvent>;

class Trace {
 public:
  explicit Trace(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  bool on() const { return on_; }
  Recorder& recorder() { return recorder_; }
  // Starts anew; now is at 0 seconds. Throws RotationError where the transport cannot tell times.
  void start();
  void stop() { on_ = false; }

  // A pass begins now. Those that a CUDA graph captures are counted only: they do not run.
  PassHandle begin_pass(const std::string& operation, const Schedule& schedule);
  void end_pass(const PassHandle& pass);
  // What the recorder has of a pass and of its compute that runs; they are open one after the other.
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

  // An event that begins now. Null for a null pass.
  EventHandle begin(const PassHandle& pass, TraceKind kind, int step, Lane lane, const std::string& label);
  EventHandle begin(const PassHandle& pass, int position, const Step& step);  // on the lane of the step
  // A hop that is sent ahead for a pass that has not begun, and a copy made for it.
  EventHandle announce(const std::string& operation, TraceKind kind, int position, const Step& hop);
  // A wait of the caller who posts a hop. Null where the compute lane does not wait for the host.
  EventHandle begin_posting(const PassHandle& pass, int position, const Step& hop);
  void end(const EventHandle& event);

  // The hop of an event leaves now; and what stands for its transfer from then on.
  void depart(const EventHandle& event);
  std::shared_ptr<Transfer> follow(const EventHandle& event, std::unique_ptr<Transfer> transfer);

  // In seconds from the start; NaN: has not ended. A hop starts when it was posted or, if that is later, when those
  // before it on its channel had arrived.
  struct Pass {
    std::string operation;
    ScheduleOptions options;
    double start, end;
  };
  struct Event {
    int pass;  // its number; -1: none
    std::string operation;
    int step;
    TraceKind kind;
    Lane lane;
    std::string label;
    double start, end;
    double posted;  // a hop's; of anything else the start
  };
  struct Result {
    double zero;  // the start, in seconds of the host's steady clock
    int64_t captured;
    std::vector<Pass> passes;
    std::vector<Event> events;
  };
  // What was recorded, and forgets it. Events that have not ended are left out; a GPU is waited for.
  Result read();

 private:
  EventHandle add(const PassHandle& pass, const std::string& operation, TraceKind kind, int step, Lane lane,
                  const std::string& label);

  std::shared_ptr<Transport> transport_;
  Recorder recorder_;
  bool on_ = false;
  bool on_host_ = false;  // computes are the host's, which waits for hops and posts them
  uint64_t recording_ = 0;
  HostClock::time_point host_zero_;
  Moment zero_;
  int64_t captured_ = 0;
  std::vector<PassHandle> passes_;
  std::vector<EventHandle> events_;
};

}  // namespace rtp
