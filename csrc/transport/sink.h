// What a ring does over time: its passes, computes, hops, waits and collectives.
//
// The most recent events are always kept, in a buffer of fixed size of plain structs: an event takes one entry and one
// or two clock reads, without locks or allocations. The buffer, a record, is written to a file when the ring fails, and
// on request; the writing function is async-signal-safe. `python -m rtp_ext record` reads the files of all ranks;
// rtp_ext/observe/record.py depends on the layout of Entry. All events of all streams are kept while a trace is on,
// with the times of their streams; while it is off it costs a branch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/streams.h"
#include "schedule/schedule.h"
#include "schedule/uses.h"

namespace rtp {

struct Hop;
class Transfer;
class Transport;

enum class Lane : uint8_t { compute, side, weight, gradient, outer_weight, outer_gradient };

// Kind of an event of a trace: a step of a schedule; a wait of the compute stream for a hop (its arrival, its
// departure, or on CPU also its posting, which the caller does itself), for a pull, a slot, or a collective; a
// conversion: local tensors are copied, cast or quantized before they travel, or arrived ones dequantized.
enum class TraceKind : uint8_t { step, wait, stage };

const char* name(Lane lane);
const char* name(TraceKind kind);

// The times of a trace, which read_trace() sets, are in seconds from its start; NaN: not ended.
struct TracePass {
  uint64_t recording;  // a pass may outlive the trace that it began in
  int number;
  std::string operation;
  ScheduleOptions options;
  Moment start, end;
  double began = 0, ended = 0;
};
struct TraceEvent {
  std::shared_ptr<TracePass> pass;  // null: a prefetched hop whose pass has not been traced
  std::string operation;
  int step;  // position in the schedule; for a wait, the waiting step; kNoStep at either end of a pass
  TraceKind kind;
  Lane lane;
  std::string label;
  Moment start, end;
  // A hop began when it was posted or, if later, when the earlier hops of its channel had arrived.
  double posted = 0, began = 0, ended = 0;

  static constexpr int kNoStep = -1;
};

// What has begun: its entry in the buffer (0: none), and what the trace keeps of it (null: the trace is off).
template <typename Traced>
struct Begun {
  uint64_t entry = 0;
  std::shared_ptr<Traced> traced;

  explicit operator bool() const { return traced != nullptr; }
  Traced* operator->() const { return traced.get(); }
};
using PassHandle = Begun<TracePass>;
using EventHandle = Begun<TraceEvent>;

class Sink {
 public:
  enum class Kind : uint8_t { pass, compute, hop, wait, collective };

  // Times are nanoseconds of the host's steady clock; 0: not yet.
  struct Entry {
    uint64_t number;  // counts all entries from 1; 0: being written
    int64_t begin;    // hop: when it was posted
    int64_t end;      // hop: when a wait found that it had arrived
    int64_t sent;     // hop: when a wait found that it had left
    uint64_t bytes;   // hop: bytes sent
    uint32_t count;   // hop: number of earlier hops of its channel; wait: the same of its hop
    uint16_t operation;
    int16_t to;     // hop and wait: the receiving rank; of a gather or scatter Hop::kAllRanks, as `from`
    int16_t from;   // hop and wait: the sending rank; compute: the owner of the shard
    int16_t index;  // hop: index among those of its channel in the pass
    int16_t hops;   // hop: number of hops of its channel in the pass
    Kind kind;
    Channel channel;
    uint8_t what;  // compute: Compute, or kMove for a copy or an addition; wait: End
    uint8_t padding[7];
  };
  static_assert(sizeof(Entry) == 64);
  static constexpr uint8_t kMove = 3;

  static constexpr uint64_t kEntries = 8192;
  static constexpr size_t kNames = 512, kNameBytes = 96;

  explicit Sink(std::shared_ptr<Transport> transport);
  ~Sink();
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;

  // -- events ---------------------------------------------------------------------------------------------------------

  // A pass begins. Passes captured into a CUDA graph are only counted in a trace, because they do not run.
  PassHandle begin_pass(const std::string& operation, const Schedule& schedule);
  // A pass begins that is enqueued as a graph, which no trace has.
  PassHandle begin_graph(const std::string& operation);
  EventHandle begin_compute(const PassHandle& pass, int position, const Step& step);
  template <typename Traced>
  void end(const Begun<Traced>& begun) {
    end_entry(begun.entry);
    if (begun) begun->end = now();
  }

  // Starts a hop, the `before`-th of its channel, of an event that has begun.
  std::shared_ptr<Transfer> post(EventHandle event, const Hop& hop, int64_t before);
  // Runs `wait` for one end of a hop. A wait that throws stays open, so that the record shows it.
  template <typename Wait>
  void waiting(const EventHandle& hop, End which, const Transfer& transfer, Wait&& wait) {
    const int64_t begin = begin_wait(hop.entry, which);
    wait();
    end_wait(hop.entry, which, begin);
    if (which == End::received && hop && !hop->end) arrive(hop, transfer);
  }

  // A collective of torch.distributed that the calling thread waits for; one at a time. Returns its entry.
  uint64_t begin_collective(const std::string& operation);
  void end_collective(uint64_t entry);

  // -- events of a trace alone ----------------------------------------------------------------------------------------

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
    EventHandle event;
    if (product) event = begin({0, product->pass}, kind, product->step, product->lane, label());
    work();
    end(event);
    if (event) product->start = event->end;
  }
  // Marks the departure of the event's hop.
  void depart(const EventHandle& event, const Hop& hop);

  // -- the trace ------------------------------------------------------------------------------------------------------

  bool tracing() const { return tracing_; }
  // Starts a new trace with the current time as 0 s. Throws RotationError if the transport does not support timing.
  void start_trace();
  void stop_trace() { tracing_ = false; }

  struct Trace {
    double zero = 0;  // start time, in seconds of the host's steady clock
    int64_t captured = 0;
    std::vector<std::shared_ptr<TracePass>> passes;
    std::vector<std::shared_ptr<TraceEvent>> events;
  };
  // Returns and clears the traced events. Events that have not ended are omitted; blocks until the GPU has reached
  // them.
  Trace read_trace();

  // -- the record -----------------------------------------------------------------------------------------------------

  // Identity and location of the file. `ring`: equal on all ranks of a ring, and unique to it. Before this call, no
  // file is written. The folder is RTP_RECORD_DIR or, if unset, the temporary folder; an empty RTP_RECORD_DIR disables
  // the file of a failed ring.
  struct Place {
    int rank = 0;
    int ranks = 1;
    std::string ring, transport, host;
    bool on_host = true;  // the host computes and waits; otherwise times are those of enqueueing
  };
  void identify(const Place& place);
  // For measuring its cost.
  void enable(bool on) { on_ = on; }

  // The most recently posted hop, in the format of Hop::describe, and its receiver; empty if there is none.
  std::string last_hop() const;

  // Writes the file and returns its path. Throws std::runtime_error on failure.
  std::string write_record(const std::string& reason);
  // The same for a failed ring: appends the path of the file to `reason`, and returns the appended text.
  const std::string& fail(std::string& reason) noexcept;
  const std::string& note() const { return note_; }

  // Makes SIGUSR1 write the files of all rings of the process. Returns false if the signal has another handler.
  static bool take_signal();

 private:
  static constexpr size_t kPathBytes = 512;

  struct Header;

  Entry* add(Kind kind);
  uint16_t name(const std::string& operation);
  uint64_t add_named(Kind kind, const std::string& operation);
  uint64_t add_hop(const Hop& hop, int64_t before);
  void end_entry(uint64_t number);
  int64_t begin_wait(uint64_t hop, End which);
  void end_wait(uint64_t hop, End which, int64_t begin);
  static void arrive(const EventHandle& hop, const Transfer& transfer);
  EventHandle keep(const PassHandle& pass, const std::string& operation, TraceKind kind, int step, Lane lane,
                   const std::string& label);
  Moment now() const;
  bool captures() const;
  void enlist();
  void strike();
  bool write(const char* reason) const noexcept;
  static void on_signal(int) noexcept;

  std::shared_ptr<Transport> transport_;

  std::unique_ptr<Entry[]> entries_;
  std::unique_ptr<char[]> names_;  // kNames * kNameBytes
  std::unordered_map<std::string, uint16_t> known_;
  // most recent entry of known_: the hops of a pass share it
  const std::pair<const std::string, uint16_t>* named_ = nullptr;
  std::atomic<uint64_t> next_{1};
  bool on_ = true;
  uint32_t posted_[2] = {};
  // The wait in progress; waiting_for_ is the entry of its hop.
  uint64_t waiting_for_ = 0;
  int64_t waiting_since_ = 0;
  End waiting_end_ = End::received;

  bool tracing_ = false;
  bool on_host_ = false;  // the host computes, posts hops and waits for them
  uint64_t recording_ = 0;
  Moment zero_;
  Trace trace_;
  EventHandle collective_;

  Place place_;
  bool on_failure_ = true;
  char path_[kPathBytes] = {}, partial_[kPathBytes] = {};
  std::string note_;
};

}  // namespace rtp
