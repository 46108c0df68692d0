// Data for the one-line problems of every op: memory with poison around it, and the error of results.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "blocksparse/dtype.h"
#include "blocksparse/tensor.h"

namespace blocksparse::gemm {

// Bytes at a multiple of 64, the alignment that frameworks give.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};
using Bytes = std::vector<char, AlignedAllocator<char>>;

// Bytes of poison before and after a buffer. 64 bytes would put every row of x across two of a card's cache lines, and
// calls would take 1.1x to 1.2x the time that a framework's tensors take.
inline constexpr int64_t kGuard = 256;
inline constexpr char kPoison = -1;  // NaN in every element type

// The error of results.
struct ResultError {
  double worst = 0;  // largest |out - expected| / bound: right if <= 1, Inf if only one of the two is NaN
  double absolute = 0;
  double nonzero = 0;  // share of expected values that are not 0
  std::string where;   // of the worst element
};
// Half the distance from 1 to the next number.
double epsilon(DType dtype);
// The relative error of one rounding of a sum: half a unit in the last place, a whole one for neon_bf16, which rounds
// to odd.
double sum_epsilon(DType dtype, const Device& device);
// Keeps the worst error. NaN and Inf are right where they are expected.
void note_error(double got, double expected, double allowed, int64_t at, ResultError& error);

}  // namespace blocksparse::gemm
