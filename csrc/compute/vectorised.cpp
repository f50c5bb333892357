#include "compute/vectorised.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "base/checks.h"

namespace rtp {
namespace {

constexpr std::array<const char*, 3> kNames = {"baseline", "avx2", "avx512"};  // in the order of InstructionSet

// Checks the features of the processor and the operating system, not the processor model.
InstructionSet widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::avx512;
  }
  if (__builtin_cpu_supports("avx2")) return InstructionSet::avx2;
#endif
  return InstructionSet::baseline;
}

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set{widest()};
  return set;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  return {kNames.begin(), kNames.begin() + static_cast<int>(widest()) + 1};
}

InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

std::string instruction_set_name() { return kNames.at(static_cast<size_t>(instruction_set())); }

void set_instruction_set(const std::string& name) {
  const std::vector<std::string> known = instruction_sets();
  const auto found = std::find(known.begin(), known.end(), name);
  RTP_CHECK_VALUE(found != known.end(), "expected an instruction set of this processor, the widest is ", known.back(),
                  ", got ", name);
  chosen() = static_cast<InstructionSet>(found - known.begin());
}

}  // namespace rtp
