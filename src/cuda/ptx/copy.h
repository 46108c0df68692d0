// Copies from global to shared memory that run in the background (sm_80).
#pragma once

#include <cstdint>

namespace blocksparse::ptx {

// An address in the form that instructions for shared memory take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns `value`, but makes the compiler keep it in a register instead of computing it again.
__device__ inline uint32_t held(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Copies 16 bytes past L1: the first `bytes` of the source, then zeros. Both addresses are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_16_at(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies all 16 bytes if `there` is true.
__device__ inline void cp_async_16_if(bool there, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n"
      "@there cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(there))
      : "memory");
}

// Copies 16 bytes, or zeros if `there` is false.
__device__ inline void cp_async_16_or_zeros(uint32_t to, const void* from, bool there) {
  asm volatile(
      "{\n.reg .pred not_there;\nsetp.eq.b32 not_there, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, not_there;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(there))
      : "memory");
}

__device__ inline void cp_async_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// All copies of this thread since the last commit become a group.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Groups` of this thread's groups are under way.
template <int Groups>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace blocksparse::ptx
