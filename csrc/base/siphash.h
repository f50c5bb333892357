// SipHash-2-4 (Aumasson and Bernstein, 2012): a hash of short messages that cannot be predicted without the key.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace rtp {

using SipKey = std::array<uint64_t, 2>;

// Returns the hash of `words`, whose bytes are those of a little-endian host.
template <size_t Count>
constexpr uint64_t siphash(const SipKey& key, const std::array<uint64_t, Count>& words) {
  uint64_t v0 = key[0] ^ 0x736f6d6570736575, v1 = key[1] ^ 0x646f72616e646f6d;
  uint64_t v2 = key[0] ^ 0x6c7967656e657261, v3 = key[1] ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (; count > 0; --count) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  };
  const auto take = [&](uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  for (const uint64_t word : words) take(word);
  take(uint64_t{8 * Count} << 56);  // the length in bytes
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

// The vector of the authors' reference implementation for 8 bytes.
static_assert(siphash<1>({0x0706050403020100, 0x0f0e0d0c0b0a0908}, {0x0706050403020100}) == 0x93f5f5799a932462);

}  // namespace rtp
