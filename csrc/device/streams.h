// Execution streams of computes: one or two. The base class represents the host, where computes are synchronous and the
// caller waits for hops. The streams of hops belong to the transports.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace rtp {

// A point of the compute stream that another stream can wait for. Null on the host.
using StreamEvent = std::shared_ptr<void>;

// A point in time: a time of the host's steady clock, or a timing event of a CUDA stream.
using Moment = std::shared_ptr<void>;

// A captured graph, which one call enqueues any number of times. Other streams can wait only for the stream that it is
// launched on, not for points within it.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual bool idle() const = 0;  // all launches have ended
};

using HostClock = std::chrono::steady_clock;  // one clock for all processes of a host
Moment host_moment(HostClock::time_point time = HostClock::now());

class Streams {
 public:
  virtual ~Streams() = default;

  // Returns whether computes are synchronous.
  virtual bool on_host() const { return true; }
  virtual StreamEvent record_compute() { return nullptr; }
  virtual void order_compute_after(const StreamEvent&) {}

  // Selects the compute stream for the following work: 0 is the caller's, 1 runs concurrently with it.
  virtual void select_compute_stream(int) {}
  // Returns the number of SMs of the compute device; 0 for a CPU.
  virtual int multiprocessors() const { return 0; }
  // Returns the id of the current CUDA graph capture; 0 outside a capture. Events of one capture are invalid in
  // another.
  virtual uint64_t capture() const { return 0; }
  // Runs `work`, which enqueues kernels on the compute stream. A simulated device with host kernels enqueues `work`
  // itself, so `work` may refer only to objects that live as long as the tensors that it captures.
  virtual void on_compute(const std::function<void()>& work) { work(); }
  // Mark the begin and the end of a pass. A capture neither begins nor ends within a pass, so its id is queried once.
  virtual void begin_pass() {}
  virtual void end_pass() {}
  // Called before and after the calling thread enqueues work.
  virtual void enter() {}
  virtual void leave() {}

  // Passes as CUDA graphs. begin_graph_stream() redirects the work of the calling thread to a separate stream, ordered
  // after the caller's stream; end_graph_stream() restores the caller's stream, ordered after the separate one. If
  // `captured`, the work is recorded instead of executed, and end_graph_stream() returns its graph.
  // abandon_graph_stream() does the same after a failure, without a graph; it is idempotent.
  virtual bool has_graphs() const { return false; }
  virtual void begin_graph_stream(bool captured);
  virtual std::shared_ptr<Graph> end_graph_stream() { return nullptr; }
  virtual void abandon_graph_stream() noexcept {}
  // Returns whether this package is capturing, that is between begin_graph_stream(true) and its end.
  virtual bool capturing() const { return false; }
  // Enqueues a graph on the caller's stream.
  virtual void launch(Graph&) {}

  // For traces: the current point of the compute stream, and the seconds between two moments, which may block until
  // both have been reached.
  virtual Moment compute_moment() { return host_moment(); }
  virtual double seconds(const Moment& from, const Moment& to);
};

// Scope of a pass.
class StreamsPass {
 public:
  explicit StreamsPass(Streams& streams) : streams_(streams) { streams.begin_pass(); }
  StreamsPass(const StreamsPass&) = delete;
  StreamsPass& operator=(const StreamsPass&) = delete;
  ~StreamsPass() { streams_.end_pass(); }

 private:
  Streams& streams_;
};

// Scope in which the calling thread enqueues work; setup common to its calls happens once.
class StreamsScope {
 public:
  explicit StreamsScope(Streams& streams) : streams_(streams) { streams.enter(); }
  StreamsScope(const StreamsScope&) = delete;
  StreamsScope& operator=(const StreamsScope&) = delete;
  ~StreamsScope() { streams_.leave(); }

 private:
  Streams& streams_;
};

}  // namespace rtp
