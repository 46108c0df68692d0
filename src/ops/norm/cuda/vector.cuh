// How kernels of the layer norm read, write and sum rows.
#pragma once

#include "cuda/number.h"
#include "ops/norm/norm.h"

namespace blocksparse::norm {
namespace {

// V elements of 16 bits, two in a register.
template <class T, int V>
struct alignas(2 * V) Halves {
  uint32_t words[V / 2];
  __device__ float at(int e) const { return widen(T{static_cast<uint16_t>(words[e / 2] >> 16 * (e % 2))}); }
  __device__ void clear(int e) { words[e / 2] &= e % 2 == 0 ? 0xffff0000u : 0x0000ffffu; }
  // Without this the compiler keeps elements as floats from use to use, in twice the registers.
  __device__ void stay_packed() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }
};

template <class T, int V>
struct alignas(sizeof(T) * V) Wholes {
  T v[V];
  __device__ SumOf<T> at(int e) const { return widen(v[e]); }
  __device__ void clear(int e) { v[e] = T{}; }
  __device__ void stay_packed() {}
};

// V neighbouring elements in one access.
template <class T, int V>
struct Vector {
  using Packed = std::conditional_t<sizeof(T) == 2 && V % 2 == 0, Halves<T, V + V % 2>, Wholes<T, V>>;
  __device__ static Packed load(const void* from, int64_t i) {
    return *reinterpret_cast<const Packed*>(static_cast<const T*>(from) + i);
  }
  __device__ static void load(const void* from, int64_t i, SumOf<T> (&to)[V]) {
    const Packed p = load(from, i);
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = p.at(k);
  }
  __device__ static void store(void* to, int64_t i, const SumOf<T> (&from)[V]) {
    Packed p;
    if constexpr (sizeof(T) == 2 && V % 2 == 0) {
#pragma unroll
      for (int k = 0; k < V; k += 2) p.words[k / 2] = narrow_pair(from[k], from[k + 1], T{});
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) p.v[k] = narrow<T>(from[k]);
    }
    store(to, i, p);
  }
  __device__ static void store(void* to, int64_t i, const Packed& p) {
    *reinterpret_cast<Packed*>(static_cast<T*>(to) + i) = p;
  }
};

// gain, shift and the LSTM's cell are wider than T, so they take several accesses.
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

template <class S, int V>
__device__ inline void store_sums(void* to, int64_t i, const S (&from)[V]) {
  constexpr int kAtOnce = V * sizeof(S) > 16 ? 16 / sizeof(S) : V;
#pragma unroll
  for (int k = 0; k < V; k += kAtOnce) {
    S part[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) part[e] = from[k + e];
    Vector<S, kAtOnce>::store(to, i + k, part);
  }
}

// Clears the elements that relu has cut.
template <int V, class Packed>
__device__ inline void cut_where_zero(const Packed& y, Packed& dz) {
#pragma unroll
  for (int e = 0; e < V; ++e) {
    if (!(y.at(e) > 0)) dz.clear(e);
  }
}

// dy, with 0 where relu has cut.
template <class T, int V>
__device__ inline typename Vector<T, V>::Packed grad_of_z(const Backward& p, int64_t at) {
  auto dz = Vector<T, V>::load(p.dy, at);
  if (p.relu) cut_where_zero<V>(Vector<T, V>::load(p.y, at), dz);
  return dz;
}

template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

inline constexpr int kMostWarps = 16;  // of a thread block that adds up

template <class S>
struct Two {
  S a, b;
};

template <class S>
__device__ inline Two<S> sum_of_lanes(Two<S> own) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    own.a += __shfl_xor_sync(~0u, own.a, step);
    own.b += __shfl_xor_sync(~0u, own.b, step);
  }
  return own;
}

// The sum over all threads of the block, in a fixed order, for all of them. `shared` has kMostWarps pairs for this sum
// alone.
template <class S>
__device__ inline Two<S> sum_of_block(Two<S> own, Two<S>* shared) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  own = sum_of_lanes(own);
  if (lane == 0) shared[warp] = own;
  __syncthreads();
  return sum_of_lanes(lane < blockDim.x / 32 ? shared[lane] : Two<S>{0, 0});
}

}  // namespace
}  // namespace blocksparse::norm
