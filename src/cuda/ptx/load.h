// Loads from global memory into registers, as words of 32 bits. Addresses are multiples of the size.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

__device__ inline void ld_4(uint32_t* to, const void* from) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

__device__ inline void ld_8(uint32_t* to, const void* from) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

__device__ inline void ld_16(uint32_t* to, const void* from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}

// The loads below are for data that is read once: they take no place in L1.
__device__ inline void ld_stream_4(uint32_t* to, const void* from) {
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

__device__ inline void ld_stream_8(uint32_t* to, const void* from) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

// L2 brings the whole line of 128 bytes, for a warp that reads half of each of 8 rows while another warp reads the
// other half: `stream_w`, 12288 x 12288, density .25, b = 128, n = 32, H200, 2026-11-22: 30.0 us -> 27.7.
__device__ inline void ld_stream_16(uint32_t* to, const void* from) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}

// Brings a line of 128 bytes into L2.
__device__ inline void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

}  // namespace blocksparse::ptx
