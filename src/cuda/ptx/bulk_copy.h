// Copies of whole boxes that one thread starts and the hardware carries out (TMA, sm_90). Shared memory is given by
// address. A box begins at {column, row} of the matrix that a tensor map describes. Elements outside the matrix are
// loaded as 0 and not stored.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace blocksparse::ptx {

// Brings a tensor map to where copies read it.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// Loads from matrix number `matrix` of several.
__device__ inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Loads from images. The first position is {column, row(, slice)} of `image`; each pixel is shifted by the tap.
__device__ inline void load_image_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int channel, int column,
                                      int row, int image, uint16_t tap_column, uint16_t tap_row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2], {%7, %8};" ::"r"(to),
      "l"(map), "r"(barrier), "r"(channel), "r"(column), "r"(row), "r"(image), "h"(tap_column), "h"(tap_row)
      : "memory");
}
__device__ inline void load_image_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int channel, int column,
                                      int row, int slice, int image, uint16_t tap_column, uint16_t tap_row,
                                      uint16_t tap_slice) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
      "l"(map), "r"(barrier), "r"(channel), "r"(column), "r"(row), "r"(slice), "r"(image), "h"(tap_column),
      "h"(tap_row), "h"(tap_slice)
      : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ inline void load_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}

__device__ inline void store_image_box(const CUtensorMap* map, uint32_t from, int channel, int column, int row,
                                       int image) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(channel), "r"(column), "r"(row), "r"(image)
      : "memory");
}
__device__ inline void store_image_box(const CUtensorMap* map, uint32_t from, int channel, int column, int row,
                                       int slice, int image) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          map),
      "r"(from), "r"(channel), "r"(column), "r"(row), "r"(slice), "r"(image)
      : "memory");
}

// All stores of this thread since the last commit become a group.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `Groups` of this thread's groups still read shared memory.
template <int Groups>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

// Makes what threads have written to shared memory visible to background copies and to wgmma.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace blocksparse::ptx
