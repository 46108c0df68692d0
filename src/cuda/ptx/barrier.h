// More of the numbered barriers of a thread block: see bar_sync.
#pragma once

#include "cuda/ptx/warpgroup.h"

namespace blocksparse::ptx {

// Counts this warp, and does not wait for the others.
__device__ inline void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace blocksparse::ptx
