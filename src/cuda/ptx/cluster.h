// Clusters of thread blocks: their barrier in two parts, and each other's shared memory (sm_90).
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// All threads: this one has come so far, and says nothing of memory.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The same; those who wait see what it has written.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// All threads: until those of all thread blocks have arrived, or left.
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The address of what lies at `address` in this thread block's shared memory in that of thread block `rank`.
__device__ inline uint32_t shared_of_rank(uint32_t address, int rank) {
  uint32_t there = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// At a barrier in another's shared memory, `count` times. Who waits sees what this thread, and those it has waited for,
// have written before.
__device__ inline void mbarrier_arrive_cluster(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.acq_rel.cluster;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(count)
      : "memory");
#endif
}

// Until the phase of that parity is complete, of a barrier at which others of the cluster arrive.
__device__ inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace blocksparse::ptx
