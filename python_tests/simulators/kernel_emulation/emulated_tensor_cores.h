// kernels/common/tensor_cores.cuh on emulated threads, after the PTX ISA's tables of which lane holds what. A copy into
// shared memory lands when it is waited for, as late as it may; until then the chunk holds a pattern. Words behave as
// the system's atomics do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "emulated_cuda.h"

namespace emulation {

inline std::atomic<bool> blind = false;     // a planted mistake: every word looks as if it were raised
inline std::atomic<int> word_delay_us = 0;  // before every use of a word, random up to this

inline void dawdle_at_words() {
  thread_local std::minstd_rand random{static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id()))};
  const int most = word_delay_us;
  if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(most + 1)));
}

// Copies of one thread that have not landed, by group.
struct Copies {
  std::vector<std::function<void()>> open;
  std::vector<std::vector<std::function<void()>>> groups;
};
inline Copies& copies_of_this_thread() {
  thread_local std::vector<std::pair<int64_t, Copies>> all;  // by thread, with the block that they are of
  const auto thread = static_cast<size_t>(thread_index());
  if (all.size() <= thread) all.resize(thread + 1);
  if (all[thread].first != block_number()) all[thread] = {block_number(), {}};
  return all[thread].second;
}

}  // namespace emulation

namespace rtp {

template <typename Shared>
void copy_async(Shared& shared, int chunk, const void* from, int bytes) {
  if (bytes < 0 || bytes > 16) throw emulation::Violation("a copy of " + std::to_string(bytes) + " bytes");
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) throw emulation::Violation("a copy from memory that is not aligned");
  shared[chunk] = uint4{0xffc0ffc0u, 0xffc0ffc0u, 0xffc0ffc0u, 0xffc0ffc0u};  // NaNs
  emulation::copies_of_this_thread().open.push_back([&shared, chunk, from, bytes] {
    uint4 value{0, 0, 0, 0};
    std::memcpy(&value, from, static_cast<size_t>(bytes));
    shared[chunk] = value;
  });
}

inline void commit_copies() {
  auto& mine = emulation::copies_of_this_thread();
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

template <int kLast>
void await_copies() {
  auto& groups = emulation::copies_of_this_thread().groups;
  while (groups.size() > static_cast<size_t>(kLast)) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

template <bool kTransposed, typename Shared>
void load_matrices(uint32_t (&to)[4], Shared& shared, int chunk) {
  const uint4 mine = shared[chunk];
  const std::byte* const given = emulation::gather(&mine, sizeof(mine));
  const int lane = emulation::thread_index() % 32;
  const auto element = [&](int matrix, int row, int column) {
    uint16_t bits;
    std::memcpy(&bits, given + static_cast<size_t>(matrix * 8 + row) * emulation::kGiven + column * 2, sizeof(bits));
    return uint32_t{bits};
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int one = lane / 4, two = 2 * (lane % 4);
    to[matrix] = kTransposed ? element(matrix, two, one) | element(matrix, two + 1, one) << 16
                             : element(matrix, one, two) | element(matrix, one, two + 1) << 16;
  }
}

inline float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float value_of(__half x) { return __half2float(x); }

template <typename T>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  const std::byte* const given = emulation::gather(mine, sizeof(mine));
  const int lane = emulation::thread_index() % 32;
  // element `half` of register `which` of lane `of`
  const auto element = [&](int of, int which, int half) {
    uint16_t bits;
    std::memcpy(&bits, given + static_cast<size_t>(of) * emulation::kGiven + which * 4 + half * 2, sizeof(bits));
    return value_of(T{bits});
  };
  for (int inner = 0; inner < 16; ++inner) {
    const int holder = inner % 8 / 2, half = inner % 2, right = inner / 8;
    for (int row = 0; row < 2; ++row) {
      const float left = element(lane / 4 * 4 + holder, right * 2 + row, half);
      for (int column = 0; column < 2; ++column) {
        sum[row * 2 + column] += left * element((lane % 4 * 2 + column) * 4 + holder, 4 + right, half);
      }
    }
  }
}

struct DeviceWords {
  uint64_t acquire(const uint64_t* word) const {
    emulation::dawdle_at_words();
    const uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return emulation::blind ? 1 : value;
  }
  void release(uint64_t* word, uint64_t value) const {
    emulation::dawdle_at_words();
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  unsigned look(const unsigned* counter) const {
    emulation::dawdle_at_words();
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  }
  unsigned add(unsigned* counter) const {
    emulation::dawdle_at_words();
    return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
  }
  void set(unsigned* counter, unsigned value) const { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }
  void pause() const { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
};

}  // namespace rtp
