// Numbered barriers of a thread block, for warps that do not wait: see bar_sync for those that do.
#pragma once

#include "cuda/ptx/warpgroup.h"

namespace blocksparse::ptx {

// Counts this warp at the barrier without waiting for the others.
__device__ inline void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace blocksparse::ptx
