// Stores 8 x 8 matrices from registers, the inverse of ldmatrix (sm_90). Lane l gives the address of row l % 8 of
// matrix l / 8.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

__device__ inline void stmatrix_x4(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

__device__ inline void stmatrix_x4_trans(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

}  // namespace blocksparse::ptx
