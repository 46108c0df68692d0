// A random number generator that gives the same numbers on every platform (std distributions do not).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.h"

namespace blocksparse {

// xoshiro256**, seeded by SplitMix64. Source: Blackman and Vigna, ACM TOMS 47:36 (2021).
class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) word = mix_bits(seed += 0x9e3779b97f4a7c15u);
  }

  uint64_t bits() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate(state_[3], 45);
    return result;
  }

  // Uniform in [0, bound), without bias: the rare values past the last full multiple of `bound` are drawn again.
  int64_t below(int64_t bound) {
    const auto range = static_cast<uint64_t>(bound);
    const uint64_t excess = (UINT64_MAX % range + 1) % range;
    uint64_t value = bits();
    while (value > UINT64_MAX - excess) value = bits();
    return static_cast<int64_t>(value % range);
  }

  // Uniform in [0, 1), a multiple of 2^-53.
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
    }
  }

 private:
  static uint64_t rotate(uint64_t x, int k) { return x << k | x >> (64 - k); }

  uint64_t state_[4];
};

}  // namespace blocksparse
