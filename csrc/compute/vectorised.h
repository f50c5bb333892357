// CPU loops compiled for several instruction sets. All variants give identical bytes, because the build does not
// contract products and sums into fused operations (CMakeLists.txt).
#pragma once

#include <string>
#include <vector>

namespace rtp {

// baseline: the target of the whole extension. avx512: F with BW, DQ and VL, which operations on 8-bit and 16-bit words
// need.
enum class InstructionSet { baseline, avx2, avx512 };

// Returns the names of the supported instruction sets, narrowest first. The last one is used unless set_instruction_set
// selects another.
std::vector<std::string> instruction_sets();
InstructionSet instruction_set();  // the one in use
std::string instruction_set_name();
// Applies to the whole process. Throws std::invalid_argument if the processor does not support it.
void set_instruction_set(const std::string& name);

#define RTP_INLINE [[gnu::always_inline]] inline
// For a lambda; follows the parameter list.
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

// Runs `loop`, a lambda marked RTP_INLINE_LAMBDA that calls only functions marked RTP_INLINE: code that is not inlined
// is compiled for the baseline. The lambda should pass its captures by value; otherwise the compiler assumes that
// stores may modify them.
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
