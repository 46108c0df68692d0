// How kernels of the layer norm read, write and sum rows.
#pragma once

#include "cuda/number.h"

namespace blocksparse::norm {
namespace {

// V elements side by side, in one access.
template <class T, int V>
struct Vector {
  struct alignas(sizeof(T) * V) Packed {
    T v[V];
  };
  __device__ static Packed load(const void* from, int64_t i) {
    return *reinterpret_cast<const Packed*>(static_cast<const T*>(from) + i);
  }
  __device__ static void load(const void* from, int64_t i, SumOf<T> (&to)[V]) { widened(load(from, i), to); }
  __device__ static void widened(const Packed& p, SumOf<T> (&to)[V]) {
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = widen(p.v[k]);
  }
  __device__ static void store(void* to, int64_t i, const SumOf<T> (&from)[V]) {
    Packed p;
#pragma unroll
    for (int k = 0; k < V; ++k) p.v[k] = narrow<T>(from[k]);
    *reinterpret_cast<Packed*>(static_cast<T*>(to) + i) = p;
  }
};

// gain, shift and the LSTM's cell: wider than T, so in several accesses.
template <class S, int V>
__device__ inline void load_sums(const void* from, int64_t i, S (&to)[V]) {
  constexpr int kAtOnce = V * sizeof(S) > 16 ? 16 / sizeof(S) : V;
#pragma unroll
  for (int k = 0; k < V; k += kAtOnce) {
    S part[kAtOnce];
    Vector<S, kAtOnce>::load(from, i + k, part);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) to[k + e] = part[e];
  }
}

inline constexpr int kMostWarps = 16;  // of a thread block that sums

// Of all threads of the block, in a fixed order, to all of them. `shared` has room for kMostWarps pairs.
template <class S>
struct Two {
  S a, b;
};
template <class S>
__device__ inline Two<S> sum_of_block(Two<S> own, Two<S>* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    own.a += __shfl_xor_sync(~0u, own.a, step);
    own.b += __shfl_xor_sync(~0u, own.b, step);
  }
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  Two<S> sum = {0, 0};
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum.a += shared[warp].a, sum.b += shared[warp].b;
  return sum;
}

}  // namespace
}  // namespace blocksparse::norm
