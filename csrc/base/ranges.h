// Named ranges for profilers: torch.profiler's on every device, and NVTX.
#pragma once

#include <memory>
#include <string>

namespace at {
struct RecordFunction;
}

namespace rtp {

// Whether a profiler listens; without one, naming ranges would be for nothing.
bool profiled();

// What the calling thread does between `begin` and `end`, or the end of this object. Ranges of a thread nest.
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

  // `name` makes the name, where a profiler listens.
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
