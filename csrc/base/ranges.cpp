#include "base/ranges.h"

#include "base/checks.h"

#ifdef RTP_WITH_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace rtp {

#ifdef RTP_WITH_CUDA
namespace {

// Without a profiler a push returns a negative level, and naming steps would be for nothing.
bool watched() {
  static const bool watched = [] {
    const int level = nvtxRangePushA("rtp_ext");
    nvtxRangePop();
    return level >= 0;
  }();
  return watched;
}

}  // namespace

void push_range(const std::string& operation, const Step& step) {
  if (watched()) nvtxRangePushA(concat(operation, ": ", label(step)).c_str());
}
void pop_range() {
  if (watched()) nvtxRangePop();
}
#else
void push_range(const std::string&, const Step&) {}
void pop_range() {}
#endif

}  // namespace rtp
