// Delays a stream, for race tests.
#pragma once

#include <cstdint>

namespace rtp {

#ifdef RTP_WITH_CUDA
// Enqueues a single-thread kernel on `stream` (a cudaStream_t) that runs for `microseconds`. Returns the cudaError_t of
// the launch.
int launch_delay(int64_t microseconds, void* stream);
#endif

}  // namespace rtp
