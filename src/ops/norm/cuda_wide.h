// Mean and scale of rows that stay in registers: what the norm and the norm with the LSTM's cell have in common.
//   cluster   its thread blocks share the features: each has mean and squares of its slice, tells the others, and all
//             put them together in the same order
//   group     threads of a block that share Q rows; a thread has 8 features of each
#pragma once

#include <cooperative_groups.h>

#include "cuda/ptx/cluster.h"
#include "ops/norm/cuda_vector.h"
#include "ops/norm/select_cuda.h"

namespace blocksparse::norm {
namespace {

// 8 elements of 16 bits in one access, which stay packed: two of them in a register.
template <class T>
struct alignas(16) Eight {
  uint32_t words[4];

  __device__ static Eight load(const void* from, int64_t i) {
    return *reinterpret_cast<const Eight*>(static_cast<const T*>(from) + i);
  }
  __device__ void store(void* to, int64_t i) const { *reinterpret_cast<Eight*>(static_cast<T*>(to) + i) = *this; }
  __device__ float at(int e) const { return widen(T{static_cast<uint16_t>(words[e / 2] >> 16 * (e % 2))}); }
  // The compiler would rather keep elements as floats from use to use, in twice the registers.
  __device__ void stay_packed() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }
  __device__ void set_pair(int e, float low, float high) { words[e / 2] = narrow_pair(low, high, T{}); }
};

inline constexpr int kWideWarps = kWideThreads / 32;

// Where a thread is: its vector of each row, and whether there is one.
struct WideSpot {
  int rank, group, lane, warp;  // of the cluster, of the block, of the group, its first warp
  int64_t vector;
  bool inside;

  __device__ WideSpot(const WidePlan& p, int64_t vectors)
      : rank(static_cast<int>(blockIdx.x) % p.cluster),
        group(static_cast<int>(threadIdx.x) / p.width),
        lane(static_cast<int>(threadIdx.x) % p.width),
        warp(group * (p.width / 32)),
        vector(int64_t{rank} * p.per + lane),
        inside(lane < p.per && vector < vectors) {}
};

template <int Q>
struct WideShared {
  float sums[kWideWarps][Q], squares[kWideWarps][Q];
  // {mean, squares} of each slice, by turns: the next rows may come while others still read these.
  float2 slices[2][kMostSlices];
  float2 stats[kWideWarps][Q];  // of each group: mean, scale
};

// Of all lanes; row q's sum is left in lanes 4 q ... (Q = 8; 8 q ... for Q = 4). Halves of the rows change sides.
template <int Q>
__device__ inline float sum_of_rows(float (&v)[Q]) {
  static_assert(Q == 4 || Q == 8);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int step = 16;
#pragma unroll
  for (int count = Q / 2; count > 0; count /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float send = upper ? v[i] : v[i + count], keep = upper ? v[i + count] : v[i];
      v[i] = keep + __shfl_xor_sync(~0u, send, step);
    }
  }
#pragma unroll
  for (int s = 16 / Q; s > 0; s /= 2) v[0] += __shfl_xor_sync(~0u, v[0], s);
  return v[0];
}

template <int Q>
__device__ inline void leave_sums(float (&v)[Q], float (&to)[kWideWarps][Q]) {
  const float sum = sum_of_rows(v);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane % (32 / Q) == 0) to[threadIdx.x / 32][lane / (32 / Q)] = sum;
}

template <int Q>
__device__ inline float sum_of_warps(const float (&of)[kWideWarps][Q], int first, int count, int q) {
  float sum = 0;
  for (int w = 0; w < count; ++w) sum += of[first + w][q];
  return sum;
}

#if __CUDA_ARCH__ >= 900
// shared.stats of all groups, behind a barrier. rows[q]: this thread's part of row q, zeros outside.
// `turn` counts the calls of a kernel. Every thread block of the cluster makes the
// same calls, and has arrived at the cluster's barrier before.
template <class T, int Q>
__device__ inline void find_stats(const WidePlan& p, const WideSpot& spot, int64_t vectors, float epsilon, int turn,
                                  WideShared<Q>& shared, Eight<T> (&rows)[Q]) {
  const int warps = p.width / 32;
  const auto count_of = [&](int rank) {
    return 8 * static_cast<float>(max(int64_t{0}, min(int64_t{p.per}, vectors - int64_t{rank} * p.per)));
  };
  float part[Q];
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    part[q] = 0;
    rows[q].stay_packed();
#pragma unroll
    for (int e = 0; e < 8; e += 2) part[q] += rows[q].at(e) + rows[q].at(e + 1);
  }
  leave_sums(part, shared.sums);
  __syncthreads();
  const float own = fmaxf(count_of(spot.rank), 1);
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    const float mean = sum_of_warps(shared.sums, spot.warp, warps, q) / own;
    float squares = 0;
    rows[q].stay_packed();
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += (rows[q].at(e) - mean) * (rows[q].at(e) - mean);
    part[q] = spot.inside ? squares : 0;
    rows[q].stay_packed();
  }
  leave_sums(part, shared.squares);
  __syncthreads();
  auto& slices = shared.slices[turn % 2];
  const auto cluster = cooperative_groups::this_cluster();
  if (turn == 0) ptx::cluster_wait();  // the others have begun, so there is memory to write to
  const int count = p.groups * Q;
  for (int i = static_cast<int>(threadIdx.x); i < count * p.cluster; i += static_cast<int>(blockDim.x)) {
    const int q = i % Q, first = i % count / Q * warps;
    float2* to = slices + spot.rank * count + i % count;
    *cluster.map_shared_rank(to, i / count) = {sum_of_warps(shared.sums, first, warps, q) / own,
                                               sum_of_warps(shared.squares, first, warps, q)};
  }
  if (p.cluster == 1) __syncthreads();
  else cluster.sync();
  const auto i = static_cast<int>(threadIdx.x);
  if (i < count) {
    const auto features = static_cast<float>(8 * vectors);
    float mean = 0, squares = 0;
    for (int r = 0; r < p.cluster; ++r) mean += slices[r * count + i].x * count_of(r);
    mean /= features;
    for (int r = 0; r < p.cluster; ++r) {
      const float2 slice = slices[r * count + i];
      squares += slice.y + count_of(r) * (slice.x - mean) * (slice.x - mean);
    }
    shared.stats[i / Q][i % Q] = {mean, 1 / sqrtf(squares / features + epsilon)};
  }
  __syncthreads();
}
#endif

}  // namespace
}  // namespace blocksparse::norm
