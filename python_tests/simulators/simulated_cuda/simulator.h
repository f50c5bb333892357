// A CUDA runtime and an NCCL in host memory, so that transports run where there is no GPU.
//
// Ranks are threads of one process. A stream is a thread with a queue, an event is a point in a queue. The functions
// have the names and signatures of the real ones; they are hidden, because torch loads the real libraries into the same
// process. One mutex guards everything, and one condition announces every change.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

// A point in a stream. The state of an event changes with every record; who waits keeps the state it found.
struct Point {
  bool reached = false;
  std::chrono::steady_clock::time_point time;
};

// Work of a stream, run on its thread without the mutex, and the memory that it touches where that could be unmapped.
using Work = std::function<void()>;
using Memory = std::vector<std::pair<const void*, size_t>>;
struct Queued {
  Work work;
  Memory memory;
};

// Ranks are threads, and what a rank makes remembers which. Ids of threads that have ended come again; these do not.
using Maker = uint64_t;
Maker this_maker();
struct Allocation {
  size_t bytes;
  Maker maker;
};

// What a capture leaves out: mistakes that tests must notice where its graph is replayed.
enum class Forgotten : uint8_t {
  nothing,
  waits_of_computes,  // of the stream that the capture began on, and
  waits_of_hops,      // of every other stream: an event that is waited for orders nothing
  ends_of_computes,   // an event stands for what came before the newest work of its stream
  ends_of_hops,
};

struct Controls {
  int delay_us = 0;                 // before every piece of work and in the middle of every copy: random up to this
  int launch_queue = 0;             // pieces of work that fit into a blocking communicator's stream; 0: any number
  int version = 23007;              // of NCCL; functions newer than it are lacking
  bool null_windows = false;        // ncclCommWindowRegister succeeds without a window
  bool signals_abort = true;        // ncclCommAbort ends waits for signals too
  bool capturing = false;           // every stream says that it is being captured
  bool released = false;            // all waits end: for taking down a test that failed
  bool lacks_epilogues = false;     // cuBLASLt has no kernel with one
  bool lacks_memory_ops = false;    // the driver has no cuStreamWaitValue64 and its like
  int multiprocessors = 0;          // of the device; 0: nothing computes on two lanes
  int first_device = 0;             // the current device of a thread that has chosen none
  bool lacks_graph_memory = false;  // torch has no memory for graphs
  bool full_queue = false;          // the launch of a graph does not return
  Forgotten forgotten = Forgotten::nothing;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  Controls controls;
  std::mt19937 random;
  int threads = 0;                                 // of streams
  std::map<void*, Allocation> registrable;         // from ncclMemAlloc
  std::vector<std::string> mistakes;               // calls that the real libraries do not allow
  std::map<Maker, int> launches;                   // of graphs, by who launched them, that have not ended
  std::set<int> contexts;                          // devices on which this process has a context
  std::set<std::pair<Maker, std::string>> loaded;  // what each rank has used, so that the driver has loaded its code
};

World& world();

// Notes a call that the real libraries do not allow. Holds the mutex.
void mistake(const std::string& text);

// Counts a call of a function of CUDA or NCCL by this thread. Functions of the runtime that need a context make one on
// the thread's current device.
void called(const char* function);
using Calls = std::map<std::string, int64_t>;
Calls& calls();  // of this thread

// What a function of the runtime returns: an error is the thread's last one until it is asked for. cudaErrorNotReady is
// an error like any other.
cudaError_t note(cudaError_t status);
// Torch asks for the last error after it has launched a kernel, and throws whatever it finds.
void check_launch();

// Waits until `ready`, which is asked with the mutex held; also where memory that nobody announces has changed.
void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready);

// Sleeps at random.
void dawdle();

// Copies in two halves, dawdling in between.
void copy(void* to, const void* from, size_t bytes);

// Work of streams that is captured: nodes, and what each comes after.
struct Node {
  Work work;
  Memory memory;
  std::set<size_t> after;
  cudaStream_t stream;  // nodes of one stream come one after the other
};
struct Capture {
  unsigned long long id = 0;
  cudaStream_t origin = nullptr;
  std::thread::id thread;
  bool ended = false, invalid = false, mutated = false;
  std::vector<Node> nodes;
  std::map<cudaStream_t, std::set<size_t>> tails;  // of every stream that takes part: what its next node comes after
};
// cudaStreamWaitEvent for an event that was recorded in a capture: the stream takes part in it from then on. Holds the
// mutex.
cudaError_t wait_in_capture(cudaStream_t stream, const CUevent_st& event);
// cudaEventRecord in a capture. Holds the mutex.
void record_in_capture(CUevent_st& event, cudaStream_t stream);
// A capture that this thread has begun; null: none. Holds the mutex.
Capture* own_capture();
// Whether this thread captures and may not call such a function: that invalidates its capture. Holds the mutex.
bool forbidden(const char* function);
extern thread_local cudaStreamCaptureMode capture_mode;

// The stream behind a handle, for work that may outlive it; null for the host's. Holds the mutex.
std::shared_ptr<CUstream_st> held(cudaStream_t stream);

// Appends to a stream, or runs at once where the stream is the host's. Returns the point after it; null where the
// stream is being captured.
std::shared_ptr<Point> enqueue(cudaStream_t stream, Work work, Memory memory = {});

// Whether a stream that `maker` made has yet to run, or runs, work on this memory. Holds the mutex.
bool in_use(Maker maker, const void* data, size_t bytes);

// Makes the calling thread wait until everything enqueued on `stream` has run.
void synchronize(cudaStream_t stream);

// The compute stream of the calling thread. By default it is the host's: work runs at once, and a wait for an event
// makes the calling thread wait, because torch's CPU operators are synchronous. Else a stream like any other, on which
// launch_copy and launch_add compute.
void set_compute(bool asynchronous);
cudaStream_t compute_stream();
// The compute stream is this one until another is chosen. For compute streams that are not the host's.
void choose_compute(cudaStream_t stream);

}  // namespace simulated

// Opaque in CUDA's headers.
struct CUstream_st {
  std::deque<simulated::Queued> queue;
  simulated::Memory running;  // what the work that runs touches
  bool busy = false;
  bool ending = false;
  bool host = false;                            // runs everything at once, in the thread that calls
  bool waiting = false;                         // for a value in memory
  std::shared_ptr<simulated::Capture> capture;  // that it takes part in
  simulated::Maker maker = simulated::this_maker();
  int device = 0;  // that it was made on; of the host's: the current one
};
struct CUevent_st {
  std::shared_ptr<simulated::Point> point;  // of the last record; none before the first
  bool timing = false;
  std::shared_ptr<simulated::Capture> capture;  // in which it was recorded, after these nodes; then there is no point
  std::set<size_t> after;
  int device = 0;  // that it was made on
};
