// Where work runs, in which order, and when: the compute lane, and one lane per channel that hops run on. The base
// class is the host's: computes are synchronous, and the caller waits for hops itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "schedule/schedule.h"

namespace rtp {

// A point of the compute lane that another lane can wait for. Null on the host.
using StreamEvent = std::shared_ptr<void>;

// A point of a lane in time: a time of the host's steady clock, or a timing event of the lane's CUDA stream.
using Moment = std::shared_ptr<void>;

// What was captured once and is enqueued as often as wanted, in one call. Nothing may wait for what is in it but by
// waiting for the lane that it is launched on.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual bool idle() const = 0;  // no launch of it has yet to end
};

using HostClock = std::chrono::steady_clock;  // shared by all processes of a host
Moment host_moment(HostClock::time_point time = HostClock::now());

class Streams {
 public:
  virtual ~Streams() = default;

  virtual StreamEvent record_compute() { return nullptr; }
  virtual void order_compute_after(const StreamEvent&) {}
  virtual void order_channel_after(Channel, const StreamEvent&) {}

  // What is enqueued next goes to this compute lane: 0 is the caller's, 1 runs beside it.
  virtual void select_compute_stream(int) {}
  // Of the device that computes; 0 for a CPU.
  virtual int multiprocessors() const { return 0; }
  // Tells captures of a CUDA graph apart; 0 outside. Marks of one mean nothing in another.
  virtual uint64_t capture() const { return 0; }
  // Runs what enqueues kernels on the compute lane. Where a device is simulated, and kernels are the host's, `work` is
  // itself enqueued: it may name nothing that does not live as long as the tensors that it holds.
  virtual void on_compute(const std::function<void()>& work) { work(); }
  // A pass begins or ends. A capture neither begins nor ends within one: it is asked for once.
  virtual void begin_pass() {}
  virtual void end_pass() {}
  // The calling thread is about to enqueue work, or has done so.
  virtual void enter() {}
  virtual void leave() {}

  // Passes as graphs. What the calling thread enqueues after begin_aside() goes to a stream beside the caller's, after
  // what the caller's has; after end_aside() the caller's goes on behind it. `captured`: nothing of it runs, and
  // end_aside() returns its graph. leave_aside(): the same for what has failed, without a graph. Idempotent.
  virtual bool has_graphs() const { return false; }
  virtual void begin_aside(bool captured);
  virtual std::shared_ptr<Graph> end_aside() { return nullptr; }
  virtual void leave_aside() noexcept {}
  // Whether this is between begin_aside(true) and its end: what is captured then is this package's own.
  virtual bool capturing() const { return false; }
  // Enqueues a graph on the caller's lane.
  virtual void launch(Graph&) {}

  // For traces: where the compute lane has got to, where that of a channel has (null on the host, where a Transfer
  // tells when it arrived), and the seconds between two moments, which may have to be waited for.
  virtual Moment compute_moment() { return host_moment(); }
  virtual Moment channel_moment(Channel) { return nullptr; }
  virtual double seconds(const Moment& from, const Moment& to);

  // For race tests: holds up a channel before its next hop.
  virtual void delay(Channel channel, std::chrono::microseconds time);
};

// A pass, for as long as it lives.
class StreamsPass {
 public:
  explicit StreamsPass(Streams& streams) : lanes_(streams) { streams.begin_pass(); }
  StreamsPass(const StreamsPass&) = delete;
  StreamsPass& operator=(const StreamsPass&) = delete;
  ~StreamsPass() { lanes_.end_pass(); }

 private:
  Streams& lanes_;
};

// The calling thread enqueues work for as long as it lives: what its calls have in common is done once.
class StreamsScope {
 public:
  explicit StreamsScope(Streams& streams) : lanes_(streams) { streams.enter(); }
  StreamsScope(const StreamsScope&) = delete;
  StreamsScope& operator=(const StreamsScope&) = delete;
  ~StreamsScope() { lanes_.leave(); }

 private:
  Streams& lanes_;
};

}  // namespace rtp
