// Data of the one-line problems of every op: memory with poison around, and how far results are from what is expected.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "blocksparse/dtype.h"
#include "blocksparse/tensor.h"

namespace blocksparse::gemm {

// Bytes at a multiple of 64, as frameworks give them.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};
using Bytes = std::vector<char, AlignedAllocator<char>>;

// Bytes of poison before and after a buffer. 64 put every row of x across two lines of a card's cache: 1.1x to 1.2x the
// time that a tensor of any framework takes.
inline constexpr int64_t kGuard = 256;
inline constexpr char kPoison = -1;  // NaN in every element type

// How far results are from what is expected.
struct ResultError {
  double worst = 0;  // largest |out - expected| / bound; right if <= 1. NaN where one is NaN and not the other
  double absolute = 0;
  double nonzero = 0;  // share of expected values that are not 0
  std::string where;   // of the worst element
};
// The distance of 1 to the next number, halved.
double epsilon(DType dtype);
// By how much sums of products of that type err at each rounding, of their size: to nearest half a unit in the last
// place, but neon_bf16 rounds to odd, and up to a unit.
double sum_epsilon(DType dtype, const Device& device);
// Keeps the worst of them; NaN and Inf where they are expected are right.
void note_error(double got, double expected, double allowed, int64_t at, ResultError& error);

}  // namespace blocksparse::gemm
