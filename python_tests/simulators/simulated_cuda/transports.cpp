// The sources under test, in one unit because their headers take most of the time. A transport more is a line more.
#include "../../../csrc/base/host.cpp"
#include "../../../csrc/device/cuda_lanes.cpp"
#include "../../../csrc/device/lanes.cpp"
#include "../../../csrc/device/nccl/communicators.cpp"
#include "../../../csrc/schedule/schedule.cpp"
#include "../../../csrc/schedule/straight.cpp"
#include "../../../csrc/schedule/two_level.cpp"
#include "../../../csrc/transport/cuda_transport.cpp"
#include "../../../csrc/transport/nccl/nccl.cpp"
#include "../../../csrc/transport/nccl/peer_news.cpp"
#include "../../../csrc/transport/nccl/put.cpp"
#include "../../../csrc/transport/nccl/supervised.cpp"
#include "../../../csrc/transport/nccl/watchdog.cpp"
#include "../../../csrc/transport/recorder.cpp"
#include "../../../csrc/transport/shm/shared_memory.cpp"
#include "../../../csrc/transport/transport.cpp"

// There is no allocator of torch's to take a pool from: what a captured pass works in, the tests keep.
struct rtp::GraphMemory::Pool {};
rtp::GraphMemory::GraphMemory(c10::Device device) : device_(device) {}
rtp::GraphMemory::~GraphMemory() = default;
void rtp::GraphMemory::begin() {}
void rtp::GraphMemory::end() noexcept {}
