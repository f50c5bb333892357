// Named profiler ranges: torch.profiler on every device, and NVTX.
#pragma once

#include <memory>
#include <string>

namespace at {
struct RecordFunction;
}

namespace rtp {

// Returns whether a profiler is active. Without one, range names are not built.
bool profiled();

// A range of the calling thread, from begin() to end() or to the destructor. Ranges of a thread nest.
class Range {
 public:
  Range();
  template <typename Name>
  explicit Range(const Name& name) : Range() {
    begin(name);
  }
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // `name` returns the name; it is called only if a profiler is active.
  template <typename Name>
  void begin(const Name& name) {
    if (profiled()) start(name());
  }
  void end() {
    if (open_) stop();
  }

 private:
  void start(const std::string& name);
  void stop();

  bool open_ = false;
  std::unique_ptr<at::RecordFunction> record_;
};

}  // namespace rtp
