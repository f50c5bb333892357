// The sources under test, in one translation unit because their headers dominate the compile time. A new transport adds
// one line.
#include "../../../csrc/base/host.cpp"
#include "../../../csrc/device/cuda_streams.cpp"
#include "../../../csrc/device/nccl/communicators.cpp"
#include "../../../csrc/device/nccl/live_graphs.cpp"
#include "../../../csrc/device/streams.cpp"
#include "../../../csrc/schedule/schedule.cpp"
#include "../../../csrc/schedule/two_level.cpp"
#include "../../../csrc/transport/cuda_transport.cpp"
#include "../../../csrc/transport/nccl/nccl.cpp"
#include "../../../csrc/transport/nccl/peer_status.cpp"
#include "../../../csrc/transport/nccl/supervised.cpp"
#include "../../../csrc/transport/nccl/watchdog.cpp"
#include "../../../csrc/transport/record.cpp"
#include "../../../csrc/transport/shm/shared_memory.cpp"
#include "../../../csrc/transport/sink.cpp"
#include "../../../csrc/transport/transport.cpp"
#include "simulator.h"

// There is no CUDA allocator of torch here: the tests keep the memory of a captured pass alive. Freeing it while a
// graph of its rank runs is reported.
struct rtp::GraphMemory::Pool {
  simulated::Maker maker = simulated::this_maker();
};
rtp::GraphMemory::GraphMemory(c10::Device device) : device_(device), pool_(std::make_unique<Pool>()) {
  if (simulated::world().controls.lacks_graph_memory) throw CudaError("torch has no memory for graphs");
}
rtp::GraphMemory::~GraphMemory() {
  const std::lock_guard lock(simulated::world().mutex);
  if (simulated::world().launches[pool_->maker] > 0) simulated::mistake("the memory of graphs ends while one runs");
}
void rtp::GraphMemory::begin() {}
void rtp::GraphMemory::end() noexcept {}
