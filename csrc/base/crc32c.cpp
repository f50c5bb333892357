#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace rtp {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli polynomial, bit-reversed

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
    table[byte] = rest;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
#define RTP_CRC_TARGET __attribute__((target("sse4.2")))
RTP_CRC_TARGET uint64_t crc_word(uint64_t rest, uint64_t word) { return _mm_crc32_u64(rest, word); }
RTP_CRC_TARGET uint32_t crc_byte(uint32_t rest, uint8_t byte) { return _mm_crc32_u8(rest, byte); }
bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#define RTP_CRC_TARGET
uint64_t crc_word(uint64_t rest, uint64_t word) { return __crc32cd(static_cast<uint32_t>(rest), word); }
uint32_t crc_byte(uint32_t rest, uint8_t byte) { return __crc32cb(rest, byte); }
bool has_instruction() { return true; }
#endif

#if defined(RTP_CRC_TARGET)
RTP_CRC_TARGET uint32_t by_instruction(const uint8_t* from, size_t bytes, uint32_t before) {
  uint64_t rest = ~before;
  for (; bytes >= 8; bytes -= 8, from += 8) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    rest = crc_word(rest, word);
  }
  auto last = static_cast<uint32_t>(rest);
  for (; bytes > 0; --bytes) last = crc_byte(last, *from++);
  return ~last;
}
#endif

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before) {
  const auto* from = static_cast<const uint8_t*>(data);
  uint32_t rest = ~before;
  for (; bytes > 0; --bytes) rest = (rest >> 8) ^ kTable[(rest ^ *from++) & 0xff];
  return ~rest;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(RTP_CRC_TARGET)
  if (has_instruction()) return by_instruction(static_cast<const uint8_t*>(data), bytes, before);
#endif
  return crc32c_by_table(data, bytes, before);
}

}  // namespace rtp
