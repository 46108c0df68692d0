// Kernels that overlap (sm_90). A kernel that is launched to overlap begins when each thread block of the kernel before
// it has allowed it or has ended. Code for older cards has nothing to wait for.
#pragma once

namespace blocksparse::ptx {

// Waits until the kernels before this one are complete and what they wrote can be read.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// This thread block allows the next kernel to begin.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace blocksparse::ptx
