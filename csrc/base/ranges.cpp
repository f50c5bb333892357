#include "base/ranges.h"

#ifdef RTP_WITH_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace rtp {

#ifdef RTP_WITH_CUDA
// Without a profiler a push returns a negative level.
bool profiled() {
  static const bool profiled = [] {
    const int level = nvtxRangePushA("rtp_ext");
    nvtxRangePop();
    return level >= 0;
  }();
  return profiled;
}
void push_range(const std::string& name) { nvtxRangePushA(name.c_str()); }
void pop_range() { nvtxRangePop(); }
#else
bool profiled() { return false; }
void push_range(const std::string&) {}
void pop_range() {}
#endif

}  // namespace rtp
