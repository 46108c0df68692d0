// Matrices of 8 x 8 16-bit elements from shared memory into the registers of a warp. Lane l gives the address of row
// l % 8 of matrix l / 8, and receives of every matrix row l / 4, elements 2 (l % 4) and the next; transposed: column
// l / 4.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.h"

namespace blocksparse::ptx {

__device__ inline void ldmatrix_x4(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The row is given by its address in shared memory. If `wanted`, which is equal in all lanes, is 0, `to` keeps its
// value.
__device__ inline void ldmatrix_x4_trans_if(uint32_t (&to)[4], uint32_t row, uint32_t wanted) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t"
      "setp.ne.u32 wanted, %5, 0;\n\t"
      "@wanted ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
      : "r"(row), "r"(wanted)
      : "memory");
}

__device__ inline void ldmatrix_x4_at(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ inline void ldmatrix_x4_trans_at(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

}  // namespace blocksparse::ptx
