// CRC-32C (Castagnoli, RFC 3720): of 32 bits it misses one in four billion, and finds every single flipped bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rtp {

// Of `bytes` at `data`, after what `before` is the checksum of. By the processor's own instruction where it has one.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The same by a table, for processors without that instruction.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace rtp
