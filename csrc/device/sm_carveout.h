// Leaves multiprocessors (SMs) of a GPU to hops that need some. A product that launches one block for each SM, as those
// of cuBLAS on Hopper do, otherwise runs in two waves while a hop holds an SM: twice its time.
#pragma once

namespace rtp {

// Scope in which products of torch and of this package launch for all but `multiprocessors` SMs: torch's SM carveout,
// which is a setting of the process. No effect for 0, nor where the user has set it, then or later. Of scopes that
// overlap, in any order and on any threads, the first decides, and the last ends it. Before 2.14, torch may apply the
// setting to cuBLASLt alone.
class SmCarveout {
 public:
  explicit SmCarveout(int multiprocessors);
  SmCarveout(const SmCarveout&) = delete;
  SmCarveout& operator=(const SmCarveout&) = delete;
  ~SmCarveout();

 private:
  bool holds_ = false;
};

}  // namespace rtp
