#include "base/ranges.h"

#include <ATen/record_function.h>

#ifdef RTP_WITH_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace rtp {
namespace {

#ifdef RTP_WITH_CUDA
// Without a profiler, nvtxRangePush returns a negative level.
bool nvtx_listens() {
  static const bool listens = [] {
    const int level = nvtxRangePushA("rtp_ext");
    nvtxRangePop();
    return level >= 0;
  }();
  return listens;
}
void push_nvtx(const std::string& name) { nvtxRangePushA(name.c_str()); }
void pop_nvtx() { nvtxRangePop(); }
#else
bool nvtx_listens() { return false; }
void push_nvtx(const std::string&) {}
void pop_nvtx() {}
#endif

}  // namespace

bool profiled() { return nvtx_listens() || at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

Range::Range() = default;
Range::~Range() { end(); }

void Range::start(const std::string& name) {
  end();
  open_ = true;
  if (nvtx_listens()) push_nvtx(name);
  record_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (record_->isActive()) record_->before(name);
}

void Range::stop() {
  open_ = false;
  record_.reset();
  if (nvtx_listens()) pop_nvtx();
}

}  // namespace rtp
