// Clusters of thread blocks (sm_90): their barrier in two parts, and access to one another's shared memory.
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// Called by all threads: arrives at the cluster's barrier without ordering memory.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Arrives at the cluster's barrier; threads that wait see what this one has written.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Called by all threads: waits until those of all thread blocks have arrived or exited.
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The address in thread block `rank` of what lies at `address` in this thread block's shared memory.
__device__ inline uint32_t shared_of_rank(uint32_t address, int rank) {
  uint32_t there = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// Loads 16 bytes of a thread block's shared memory, by an address of shared_of_rank().
__device__ inline int4 ld_cluster_16(uint32_t from) {
  int4 v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
#endif
  return v;
}

// Arrives `count` times at a barrier in another thread block's shared memory. Threads that wait see what this thread,
// and those that it has waited for, have written before.
__device__ inline void mbarrier_arrive_cluster(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.acq_rel.cluster;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(count)
      : "memory");
#endif
}

// Waits until the phase of this parity is complete. Other thread blocks of the cluster may arrive at the barrier.
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
