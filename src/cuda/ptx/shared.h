// 16 bytes of shared memory, by address.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

__device__ inline void st_shared_16(uint32_t to, int4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline int4 ld_shared_16(uint32_t from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

}  // namespace blocksparse::ptx
