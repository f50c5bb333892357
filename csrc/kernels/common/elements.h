// Element types of the kernels.
#pragma once

#include <cstdint>

namespace rtp {

enum class Element : int32_t { float32, bfloat16, float16 };

}  // namespace rtp
