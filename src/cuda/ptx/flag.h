// Counters in global memory by which thread blocks wait for one another.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// Adds 1. A thread that sees it sees what this thread, and those of its warp before a __syncwarp, have written before.
__device__ inline void red_release_increment(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline uint32_t ld_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace blocksparse::ptx
