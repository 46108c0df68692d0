// Of groups of warps: barriers of some threads of a block, and registers that change hands (sm_90a).
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// Barrier `id` (0 is __syncthreads') of `threads` threads.
__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All warps of a warpgroup say so.
template <int Registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace blocksparse::ptx
