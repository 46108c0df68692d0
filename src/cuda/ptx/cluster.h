// The barrier of a cluster of thread blocks in two parts (sm_90).
#pragma once

namespace blocksparse::ptx {

// All threads: this one has come so far, and says nothing of memory.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// All threads: until those of all thread blocks have arrived.
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

}  // namespace blocksparse::ptx
