// Loops of ours on a CPU, compiled for several instruction sets. All of them give the same bytes, as the build
// contracts no product and sum into one rounding (CMakeLists.txt).
#pragma once

#include <string>
#include <vector>

namespace rtp {

// baseline: what the whole extension is compiled for. avx512: F with BW, DQ and VL, since words of 8 and 16 bits need
// them.
enum class InstructionSet { baseline, avx2, avx512 };

// By name, narrowest first: those that this processor has. The last one runs unless set_instruction_set names another.
std::vector<std::string> instruction_sets();
InstructionSet instruction_set();  // the one that runs
std::string instruction_set_name();
// For the whole process; throws std::invalid_argument where this processor does not have it.
void set_instruction_set(const std::string& name);

#define RTP_INLINE [[gnu::always_inline]] inline
// Of a lambda: behind its parameters.
#define RTP_INLINE_LAMBDA __attribute__((always_inline))

#if defined(__x86_64__)
template <typename Loop>
[[gnu::target("avx2")]] void run_with_avx2(const Loop& loop) {
  loop();
}
template <typename Loop>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void run_with_avx512(const Loop& loop) {
  loop();
}
#endif

// Runs `loop`, a lambda marked RTP_INLINE_LAMBDA that calls functions marked RTP_INLINE only: what is not inlined is
// compiled for the baseline. It passes what it captures by value, or the compiler sees stores that may change it.
template <typename Loop>
void vectorised(const Loop& loop) {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return run_with_avx512(loop);
    case InstructionSet::avx2:
      return run_with_avx2(loop);
    case InstructionSet::baseline:
      break;
  }
#endif
  loop();
}

}  // namespace rtp
