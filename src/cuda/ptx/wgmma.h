// sum [64, N] += a [64, 16] b [N, 16]^T by a warpgroup: 16-bit elements from shared memory, sums in f32 (sm_90a). A
// lane holds rows lane / 4 and lane / 4 + 8 of its warp's 16 rows, and columns 2 (lane % 4) and the next of each 8
// columns: sum[4 j + 2 half + k].
//
// With add = 0 the sum is a b^T alone, whatever it was.
//
// Descriptors give the matrices. a is [64, 16] with the 16 contiguous or, with TransA, the 64; b likewise.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/number.h"

namespace blocksparse::ptx {

enum class Swizzle : uint64_t { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// The descriptor of a matrix. `lead` and `stride` are the bytes between core matrices of 8 x 16 bytes along the
// contiguous side and along the other side.
__device__ inline uint64_t wgmma_matrix(uint32_t address, uint32_t lead, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(lead >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// Registers and shared memory are ready for wgmma.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Keeps a sum in its register from here on: the compiler may not delay its computation.
__device__ inline void hold(float& sum) { asm volatile("" : "+f"(sum)); }

// All wgmma of this warpgroup since the last commit become a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Groups>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

// clang-format off
#define BS_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define BS_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BS_REGISTERS_24 BS_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define BS_REGISTERS_32 BS_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BS_REGISTERS_48 BS_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BS_REGISTERS_64 BS_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BS_REGISTERS_80 BS_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define BS_REGISTERS_96 BS_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BS_REGISTERS_112 BS_REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define BS_REGISTERS_128 BS_REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BS_SUMS_4(i) "+f"(sum[i]), "+f"(sum[(i) + 1]), "+f"(sum[(i) + 2]), "+f"(sum[(i) + 3])
#define BS_SUMS_8(i) BS_SUMS_4(i), BS_SUMS_4((i) + 4)
#define BS_SUMS_16(i) BS_SUMS_8(i), BS_SUMS_8((i) + 8)
#define BS_SUMS_24(i) BS_SUMS_16(i), BS_SUMS_8((i) + 16)
#define BS_SUMS_32(i) BS_SUMS_16(i), BS_SUMS_16((i) + 16)
#define BS_SUMS_48(i) BS_SUMS_32(i), BS_SUMS_16((i) + 32)
#define BS_SUMS_64(i) BS_SUMS_32(i), BS_SUMS_32((i) + 32)
#define BS_SUMS_96(i) BS_SUMS_64(i), BS_SUMS_32((i) + 64)
#define BS_SUMS_128(i) BS_SUMS_64(i), BS_SUMS_64((i) + 64)
// n columns of a type: r registers hold the sums, the operands after them have the numbers r to r + 3.
#define BS_WGMMA(n, type, r, r1, r2, r3, r4)                                                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #r4 ", 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" BS_REGISTERS_##r "}, "  \
               "%" #r ", %" #r1 ", add, 1, 1, %" #r2 ", %" #r3 ";\n}"                                       \
               : BS_SUMS_##r(0) : "l"(a), "l"(b), "n"(TransA ? 1 : 0), "n"(TransB ? 1 : 0), "r"(add))
#define BS_WGMMA_OF_N(type)                                   \
  if constexpr (N == 16) BS_WGMMA(16, type, 8, 9, 10, 11, 12);          \
  else if constexpr (N == 32) BS_WGMMA(32, type, 16, 17, 18, 19, 20);   \
  else if constexpr (N == 48) BS_WGMMA(48, type, 24, 25, 26, 27, 28);   \
  else if constexpr (N == 64) BS_WGMMA(64, type, 32, 33, 34, 35, 36);   \
  else if constexpr (N == 96) BS_WGMMA(96, type, 48, 49, 50, 51, 52);   \
  else if constexpr (N == 128) BS_WGMMA(128, type, 64, 65, 66, 67, 68); \
  else if constexpr (N == 192) BS_WGMMA(192, type, 96, 97, 98, 99, 100); \
  else BS_WGMMA(256, type, 128, 129, 130, 131, 132)
// clang-format on

template <class T, int N, bool TransA, bool TransB, int Sums>
__device__ inline void wgmma(float (&sum)[Sums], uint64_t a, uint64_t b, int add = 1) {
  static_assert(Sums >= N / 2 &&
                (N == 16 || N == 32 || N == 48 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256));
  if constexpr (std::is_same_v<T, Bf16>) {
    BS_WGMMA_OF_N("bf16");
  } else {
    BS_WGMMA_OF_N("f16");
  }
}

#undef BS_WGMMA_OF_N
#undef BS_WGMMA
#undef BS_SUMS_4
#undef BS_SUMS_8
#undef BS_SUMS_16
#undef BS_SUMS_24
#undef BS_SUMS_32
#undef BS_SUMS_48
#undef BS_SUMS_64
#undef BS_SUMS_96
#undef BS_SUMS_128
#undef BS_REGISTERS_8
#undef BS_REGISTERS_16
#undef BS_REGISTERS_24
#undef BS_REGISTERS_32
#undef BS_REGISTERS_48
#undef BS_REGISTERS_64
#undef BS_REGISTERS_80
#undef BS_REGISTERS_96
#undef BS_REGISTERS_112
#undef BS_REGISTERS_128

}  // namespace blocksparse::ptx
