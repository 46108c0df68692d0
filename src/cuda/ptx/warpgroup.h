// Barriers of some threads of a thread block, and registers that warpgroups hand to one another (sm_90a).
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// Waits at barrier `id` (0 is that of __syncthreads) for `threads` threads.
__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All warps of a warpgroup must execute these.
template <int Registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace blocksparse::ptx
