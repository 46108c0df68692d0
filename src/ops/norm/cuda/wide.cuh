// Mean and scale of rows that stay in registers: what the norm and the norm with the LSTM's cell have in common.
//   cluster   its thread blocks share the features: their warps have mean and squares of their parts, tell all thread
//             blocks, and each puts them together in the same order
//   group     threads of a block that share Q rows; a thread has 8 features of each
#pragma once

#include <cooperative_groups.h>

#include "cuda/ptx/cluster.h"
#include "ops/norm/cuda/plan.h"
#include "ops/norm/cuda/vector.cuh"

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

// Where a thread is: its vector of each row, and whether there is one.
struct WideSpot {
  int rank, group, lane, warp;  // of the cluster, of the block, of the group, its first warp
  int64_t vector;
  bool inside;

  __device__ WideSpot(const WidePlan& p, int64_t vectors)
      : rank(static_cast<int>(blockIdx.x) & (p.cluster - 1)),
        group(static_cast<int>(threadIdx.x) / p.width),
        lane(static_cast<int>(threadIdx.x) % p.width),
        warp(group * (p.width / 32)),
        vector(int64_t{rank} * p.per + lane),
        inside(lane < p.per && vector < vectors) {}
};

// Mean, and the sum of squares of distances from it.
struct Moments {
  float mean, squares;
};

template <int Q, int Turns>
struct WideShared {
  // Of each warp of each thread block of the cluster; by turns: the next rows may come while others still read these.
  Moments parts[Turns][kMostCluster * kWideWarps * Q];
  float2 stats[kWideWarps][Q];  // of each group: mean, scale
};

// Of n and `more` elements: a becomes those of both.
struct Joining {
  float share, weight;  // of the others; their squared distance's
  __device__ Joining(float n, float more) : share(more > 0 ? more / (n + more) : 0), weight(n * share) {}
  __device__ void join(Moments& a, Moments b) const {
    const float away = b.mean - a.mean;
    a.mean += away * share;
    a.squares += b.squares + away * away * weight;
  }
};

__device__ inline Moments from_lane(Moments m, int step) {
  return {__shfl_xor_sync(~0u, m.mean, step), __shfl_xor_sync(~0u, m.squares, step)};
}

// Of all lanes, each with n elements of every row; those of row q are left in lanes 32 / Q * q and so many more.
template <int Q>
__device__ inline Moments join_lanes(Moments (&rows)[Q], float n) {
  static_assert(Q == 4 || Q == 8);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int step = 16;
#pragma unroll
  for (int count = Q / 2; count > 0; count /= 2, step /= 2) {  // half of the rows change sides
    const bool upper = (lane & step) != 0;
    const float more = __shfl_xor_sync(~0u, n, step);
    const Joining joining(n, more);
    n += more;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const Moments send = upper ? rows[i] : rows[i + count];
      if (upper) rows[i] = rows[i + count];
      joining.join(rows[i], from_lane(send, step));
    }
  }
#pragma unroll
  for (int s = 16 / Q; s > 0; s /= 2) {
    const float more = __shfl_xor_sync(~0u, n, s);
    const Joining joining(n, more);
    n += more;
    joining.join(rows[0], from_lane(rows[0], s));
  }
  return rows[0];
}

template <class T>
__device__ inline Moments moments_of(const Eight<T>& x) {
  Moments m{0, 0};
#pragma unroll
  for (int e = 0; e < 8; e += 2) m.mean += x.at(e) + x.at(e + 1);
  m.mean /= 8;
#pragma unroll
  for (int e = 0; e < 8; ++e) m.squares += (x.at(e) - m.mean) * (x.at(e) - m.mean);
  return m;
}

#if __CUDA_ARCH__ >= 900
// shared.stats of all groups, behind a barrier. rows[q]: this thread's part of row q, zeros outside. `turn` counts the
// calls of a kernel. Every thread block of the cluster makes the same calls, and has arrived at its barrier before.
template <class T, int Q, int Turns>
__device__ inline void find_stats(const WidePlan& p, const WideSpot& spot, int64_t vectors, float epsilon, int turn,
                                  WideShared<Q, Turns>& shared, Eight<T> (&rows)[Q]) {
  const auto cluster = cooperative_groups::this_cluster();
  const int lane = static_cast<int>(threadIdx.x) % 32, warps = p.width / 32, count = p.groups * Q;
  auto& parts = shared.parts[turn % Turns];
  Moments own[Q];
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    own[q] = moments_of(rows[q]);
    rows[q].stay_packed();
  }
  const Moments of_warp = join_lanes(own, spot.inside ? 8.0f : 0.0f);
  if (turn == 0) ptx::cluster_wait();  // the others have begun, so there is memory to write to
  if (lane % (32 / Q) == 0) {
    const int at = (spot.rank * warps + spot.lane / 32) * count + spot.group * Q + lane / (32 / Q);
    for (int r = 0; r < p.cluster; ++r) *cluster.map_shared_rank(&parts[at], r) = of_warp;
  }
  if (p.cluster == 1) __syncthreads();
  else cluster.sync();
  // Eight lanes for each row: lane l has the parts of thread block l % cluster.
  const int shift = __popc(p.cluster - 1), rank = lane % 8 & (p.cluster - 1), stride = 8 >> shift;
  const int own_vectors = min(p.per, static_cast<int>(vectors) - rank * p.per);
  const Moments* of_rank = parts + rank * warps * count;
  const auto sum_of_lanes = [](float v) {
#pragma unroll
    for (int step = 4; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
  };
  const auto elements = [&](int warp) { return 8 * static_cast<float>(max(0, min(32, own_vectors - 32 * warp))); };
  const float features = 8 * static_cast<float>(vectors);
  // Whole warps, for all lanes shuffle.
  for (int first = static_cast<int>(threadIdx.x) / 32 * 4; first < count; first += static_cast<int>(blockDim.x) / 8) {
    const int row = min(first + lane / 8, count - 1);
    float mean = 0, squares = 0;
#pragma unroll 4
    for (int w = lane % 8 >> shift; w < warps; w += stride) mean += elements(w) * of_rank[w * count + row].mean;
    mean = sum_of_lanes(mean) / features;
#pragma unroll 4
    for (int w = lane % 8 >> shift; w < warps; w += stride) {
      const Moments m = of_rank[w * count + row];
      squares += m.squares + elements(w) * (m.mean - mean) * (m.mean - mean);
    }
    squares = sum_of_lanes(squares);
    if (lane % 8 == 0) shared.stats[row / Q][row % Q] = {mean, 1 / sqrtf(squares / features + epsilon)};
  }
  __syncthreads();
}
#endif

}  // namespace
}  // namespace blocksparse::norm
