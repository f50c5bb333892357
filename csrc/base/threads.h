// Threads whose start can fail.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/checks.h"

namespace rtp {

// Starts a thread that runs `function`. Throws RotationError where the system allows no further one.
template <typename Function>
std::thread start_thread(Function&& function) {
  try {
    return std::thread(std::forward<Function>(function));
  } catch (const std::system_error& error) {
    throw RotationError(concat("cannot start a thread: ", error.what()));
  }
}

}  // namespace rtp
