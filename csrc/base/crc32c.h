// CRC-32C (Castagnoli, RFC 3720). It detects every single-bit error; a random error goes undetected with probability
// 2^-32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rtp {

// Returns the checksum of `bytes` bytes at `data`. `before` is the checksum of the preceding bytes. Uses the CRC
// instruction of the processor if available.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// Same result, computed with a table, for processors without a CRC instruction.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace rtp
