// Transposes a matrix of 8 x 8 16-bit elements in the registers of a warp (sm_75). Lane l holds elements 2 (l % 4) and
// the next of row l / 4.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

__device__ inline uint32_t movmatrix_trans(uint32_t row) {
  uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

}  // namespace blocksparse::ptx
