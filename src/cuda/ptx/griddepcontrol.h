// Kernels that overlap: one that is launched to do so begins when all thread blocks of the kernel in front of it have
// said that it may, or have ended (sm_90). Code for older cards has nothing to wait for.
#pragma once

namespace blocksparse::ptx {

// Until the kernels in front are complete, and what they wrote can be read.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin, as far as this thread block is concerned.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace blocksparse::ptx
