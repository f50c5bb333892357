#include "device/sm_carveout.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

namespace rtp {
namespace {

// torch warns once that the setting is experimental; users did not choose it.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

}  // namespace

SmCarveout::SmCarveout(int multiprocessors) {
  if (multiprocessors == 0 || at::globalContext()._SMCarveout_EXPERIMENTAL().has_value()) return;
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  at::globalContext()._setSMCarveout_EXPERIMENTAL(multiprocessors);
  set_ = true;
}

SmCarveout::~SmCarveout() {
  if (set_) at::globalContext()._setSMCarveout_EXPERIMENTAL(std::nullopt);
}

}  // namespace rtp
