// Mixing of 64-bit words: for content hashes and to seed generators. Not for secrets.
#pragma once

#include <cstdint>

namespace blocksparse {

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits in which every input bit reaches
// every output bit.
constexpr uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

constexpr uint64_t hash_word(uint64_t hash, uint64_t word) { return mix_bits(hash + 0x9e3779b97f4a7c15u + word); }

}  // namespace blocksparse
