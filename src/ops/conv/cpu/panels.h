// Packs images for the kernels: features side by side, in blocks of channels, with zeros where taps leave the image.
#pragma once

#include "ops/conv/cpu/plan.h"

namespace blocksparse::conv {

// The place of a phase or a box along each axis.
struct Index {
  int64_t z = 0, y = 0, x = 0;
};
inline Index index_of(int64_t i, int64_t y, int64_t x) { return {i / (x * y), i / x % y, i % x}; }

// Packed images: Sum [blocks of channels][round][b].
struct Panels {
  const Images& from;
  const int32_t* order = nullptr;  // of channels, or null
  DType dtype = DType::f32;
  int64_t block = 0;
  void* data = nullptr;
  int64_t round = 0;  // positions
  void (*pack)(const gemm::RowsToPack&, int64_t first_block, int64_t last_block) = nullptr;
  int32_t threads = 1;

  // Packs the box at `begin` with all that its taps reach. An image is `phases` grids of `positions`, whose rows are
  // axis[2].pitch apart.
  void gathered(const AxisPlan (&axis)[3], int64_t positions, const Index& begin, int64_t image, int64_t images) const;
  // Packs the pixels of the box alone, one after the other.
  void plain(const Index& begin, const Index& size, int64_t image, int64_t images) const;
  void zero(int64_t first_block, int64_t last_block, int64_t position, int64_t count) const;

 private:
  gemm::RowsToPack rows() const;
  const void* pixel(int64_t image, int64_t z, int64_t y, int64_t x) const;
  // Calls body(first block of channels, last, i) for slices of channels and i < count, in parallel.
  template <class Body>
  void for_each_slice(int64_t count, Body body) const;
};

}  // namespace blocksparse::conv
