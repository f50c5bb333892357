// A CUDA runtime and an NCCL in host memory, so that transports run without a GPU.
//
// Ranks are threads of one process. A stream is a thread with a queue, an event is a point in a queue. The functions
// have the names and signatures of the real ones; they are hidden, because torch loads the real libraries into the same
// process. One mutex guards all state, and one condition variable announces every change.
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

// A point in a stream. An event gets a new point with every record; a wait keeps the point of its call.
struct Point {
  bool reached = false;
  std::chrono::steady_clock::time_point time;
};

// Work of a stream, run on its thread without the mutex, and the memory that it uses, if that could be unmapped.
using Work = std::function<void()>;
using Memory = std::vector<std::pair<const void*, size_t>>;
struct Queued {
  Work work;
  Memory memory;
};

// Identifies the rank (thread) that created an object. Ids of ended threads are reused; these are not.
using Maker = uint64_t;
Maker this_maker();
struct Allocation {
  size_t bytes;
  Maker maker;
};

// Planted mistakes of a capture, which tests must detect when its graph is replayed.
enum class Forgotten : uint8_t {
  nothing,
  waits_of_computes,  // waits of the stream on which the capture began
  waits_of_hops,      // waits of every other stream are dropped
  ends_of_computes,   // an event excludes the newest work of its stream
  ends_of_hops,
};

struct Controls {
  int delay_us = 0;                 // maximum random delay before every work item and in the middle of every copy
  int launch_queue = 0;             // queue size of a blocking communicator's stream; 0: unlimited
  int version = 23007;              // NCCL version; newer functions are missing
  bool null_windows = false;        // ncclCommWindowRegister succeeds without a window
  bool capturing = false;           // every stream reports that it is being captured
  bool released = false;            // all waits end, to clean up after a failed test
  bool lacks_epilogues = false;     // cuBLASLt has no kernel with an epilogue
  bool lacks_products = false;      // cuBLASLt has no kernel at all
  bool refuses_products = false;    // the heuristic of cuBLASLt finds kernels that cublasLtMatmul then refuses
  bool lacks_memory_ops = false;    // the driver lacks cuStreamBatchMemOp and similar functions
  int multiprocessors = 0;          // SMs of the device; 0: a single compute stream
  int first_device = 0;             // default current device of a thread
  bool lacks_graph_memory = false;  // torch fails to allocate memory for graphs
  bool first_contact = false;       // a call with a new peer of NCCL returns, or settles, once the peer has called, too
  bool serial_launches = false;     // the work of all communicators of a rank runs in the order of the host's calls
  bool full_queue = false;          // the launch of a graph does not return
  Forgotten forgotten = Forgotten::nothing;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  Controls controls;
  std::mt19937 random;
  int threads = 0;                                 // number of stream threads
  std::map<void*, Allocation> registrable;         // from ncclMemAlloc
  std::map<void*, Allocation> pinned;              // by cudaHostRegister
  std::vector<std::string> mistakes;               // calls that the real libraries forbid
  std::map<Maker, int> launches;                   // running graph launches, by rank
  std::set<int> contexts;                          // devices with a context of this process
  std::set<std::pair<Maker, std::string>> loaded;  // functions whose code the driver has loaded, by rank
};

World& world();

// Records a call that the real libraries forbid. Requires the mutex.
void mistake(const std::string& text);

// Counts a call of a CUDA or NCCL function by this thread. Runtime functions that need a context create one on the
// thread's current device.
void called(const char* function);
using Calls = std::map<std::string, int64_t>;
Calls& calls();  // calls of this thread

// Returns `status` from a runtime function; an error, including cudaErrorNotReady, becomes the last error of the
// thread.
cudaError_t note(cudaError_t status);
// torch queries the last error after every kernel launch and throws it.
void check_launch();

// Waits until `ready`, which is called with the mutex held; polls as well, for memory changes without a notification.
void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready);

// Sleeps for a random time.
void dawdle();

// Copies in two halves, with a random delay between them.
void copy(void* to, const void* from, size_t bytes);

// Captured work of streams: nodes and their predecessors.
struct Node {
  Work work;
  Memory memory;
  std::set<size_t> after;
  cudaStream_t stream;  // nodes of one stream are ordered
};
struct Capture {
  unsigned long long id = 0;
  cudaStream_t origin = nullptr;
  std::thread::id thread;
  bool ended = false, invalid = false, mutated = false;
  std::vector<Node> nodes;
  std::map<cudaStream_t, std::set<size_t>> tails;  // by participating stream: predecessors of its next node
  std::vector<std::shared_ptr<void>> kept;         // until the graph and everything made of it are gone
};
// Keeps `object` as long as the graph that `stream` is being captured into; without a capture, drops it. Requires the
// mutex.
void keep_with_graph(cudaStream_t stream, std::shared_ptr<void> object);
// cudaStreamWaitEvent for an event of a capture: the stream joins the capture. Requires the mutex.
cudaError_t wait_in_capture(cudaStream_t stream, const CUevent_st& event);
// cudaEventRecord in a capture. Requires the mutex.
void record_in_capture(CUevent_st& event, cudaStream_t stream);
// Returns the capture that this thread has begun, or null. Requires the mutex.
Capture* own_capture();
// Returns whether this thread captures and may not call `function`, which invalidates the capture. Requires the mutex.
bool forbidden(const char* function);
extern thread_local cudaStreamCaptureMode capture_mode;

// Returns the stream of a handle, for work that may outlive it; null for the host stream. Requires the mutex.
std::shared_ptr<CUstream_st> held(cudaStream_t stream);

// Appends work to a stream, or runs it at once on the host stream. Returns the point after it; null if the stream is
// being captured.
std::shared_ptr<Point> enqueue(cudaStream_t stream, Work work, Memory memory = {});

// Returns whether a stream of `maker` has pending or running work on this memory. Requires the mutex.
bool in_use(Maker maker, const void* data, size_t bytes);

// Blocks the calling thread until all work on `stream` has run.
void synchronize(cudaStream_t stream);

// Sets the compute stream of the calling thread. By default, it is the host stream: work runs at once, and a wait for
// an event blocks the calling thread, because torch's CPU operators are synchronous. If asynchronous, it is an ordinary
// stream, on which launch_copy and launch_add compute.
void set_compute(bool asynchronous);
cudaStream_t compute_stream();
// Selects the compute stream until the next call. Requires asynchronous computes.
void choose_compute(cudaStream_t stream);

}  // namespace simulated

// Opaque in CUDA's headers.
struct CUstream_st {
  std::deque<simulated::Queued> queue;
  simulated::Memory running;  // memory of the running work
  bool busy = false;
  bool ending = false;
  bool host = false;                            // runs all work at once, in the calling thread
  bool waiting = false;                         // waits for a value in memory
  std::shared_ptr<simulated::Capture> capture;  // capture that the stream takes part in
  simulated::Maker maker = simulated::this_maker();
  int device = 0;  // that it was made on; of the host's: the current one
};
struct CUevent_st {
  std::shared_ptr<simulated::Point> point;  // point of the last record; null before the first
  bool timing = false;
  std::shared_ptr<simulated::Capture> capture;  // capture in which it was recorded; replaces the point
  std::set<size_t> after;
  int device = 0;  // that it was made on
};
