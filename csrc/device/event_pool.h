// A pool of CUDA events: the driver takes longer to create an event than to record it.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <mutex>
#include <vector>

#include "base/handles.h"

namespace rtp {

class EventPool {
 public:
  // Returns an unused event without timing. The event returns to the pool with its last handle, on any thread; waits
  // that were enqueued before refer to the earlier recording.
  std::shared_ptr<Event> take() {
    std::unique_ptr<Event> event;
    {
      const std::lock_guard lock(idle_->mutex);
      if (!idle_->events.empty()) {
        event = std::move(idle_->events.back());
        idle_->events.pop_back();
      }
    }
    if (event == nullptr) event = std::make_unique<Event>();
    return std::shared_ptr<Event>(event.release(), [idle = idle_](Event* used) {
      std::unique_ptr<Event> back(used);
      const std::lock_guard lock(idle->mutex);
      idle->events.push_back(std::move(back));
    });
  }

 private:
  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<Event>> events;
  };

  std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
};

}  // namespace rtp

#endif  // RTP_WITH_CUDA
