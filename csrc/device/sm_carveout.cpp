#include "device/sm_carveout.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <optional>

namespace rtp {
namespace {

// torch warns once that the setting is experimental; users did not choose it.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

std::mutex mutex;
int scopes = 0;
int set_to = 0;  // by the first of the scopes

std::optional<int32_t> current() { return at::globalContext()._SMCarveout_EXPERIMENTAL(); }

}  // namespace

SmCarveout::SmCarveout(int multiprocessors) {
  if (multiprocessors == 0) return;
  const std::lock_guard lock(mutex);
  if (scopes == 0) {
    if (current().has_value()) return;
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    at::globalContext()._setSMCarveout_EXPERIMENTAL(multiprocessors);
    set_to = multiprocessors;
  }
  ++scopes;
  holds_ = true;
}

SmCarveout::~SmCarveout() {
  if (!holds_) return;
  const std::lock_guard lock(mutex);
  if (--scopes == 0 && current() == set_to) at::globalContext()._setSMCarveout_EXPERIMENTAL(std::nullopt);
}

}  // namespace rtp
