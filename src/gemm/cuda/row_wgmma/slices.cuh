// How the kernel `row_wgmma` adds the slices of a row: the thread blocks of a cluster that have them leave their sums
// in the workspace, say so to each other, and then each adds all slices of its part of the tokens, in order. While they
// wait, others of the SM multiply, and their own feeding warps fill the rings for the next job.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/warpgroup.h"
#include "gemm/cuda/row_wgmma/feed.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

template <class K>
class Slices {
 public:
  // The warps that multiply. All slices of a row have been jobs of a cluster as often as each other, so they agree
  // which of two barriers it is; none is used again before all have passed the other.
  template <class Sums>
  __device__ void share(const Args& p, Shared<K>& shared, const int4& note, const Sums& sums) {
    const int slot = note.w / 16, slices = note.w % 16, index = rank() % slices;
    leave(p, slot, note.z, sums);
    const uint32_t barrier = shared_address(&shared.slices[turn_]);
    ptx::bar_sync(kBarrier, kThreads);
    if (static_cast<int>(threadIdx.x) < slices) {
      const int other = rank() - index + static_cast<int>(threadIdx.x);
      ptx::mbarrier_arrive_cluster(ptx::shared_of_rank(barrier, other), kClusterPieces / slices);
    }
    ptx::mbarrier_wait_cluster(barrier, phase_);
    phase_ ^= static_cast<uint32_t>(turn_), turn_ ^= 1;
    add(p, slot - index, slices, index, note);
  }

 private:
  static constexpr int kThreads = 128, kBarrier = 1, kVectors = kBlock / 8;  // of 8 outputs

  __device__ static int rank() { return static_cast<int>(blockIdx.x) % kClusterPieces; }
  __device__ static float* at(const Args& p, int slot, int token, int output) {
    return p.partial + (int64_t{slot} * p.n + token) * kBlock + output;
  }

  template <class Sums>
  __device__ static void leave(const Args& p, int slot, int first_token, const Sums& sums) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < K::kSums; i += 2) {
        const int token = first_token + half * 64 + thread / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
        if (token >= p.n) continue;
        *reinterpret_cast<float2*>(at(p, slot, token, i / 4 * 8 + lane % 4 * 2)) = {sums[half][i], sums[half][i + 1]};
      }
    }
  }

  __device__ static void add(const Args& p, int first_slot, int slices, int index, const int4& note) {
    const int each = kTokens * kVectors / slices;
    for (int i = static_cast<int>(threadIdx.x); i < each; i += kThreads) {
      const int token = note.z + (index * each + i) / kVectors, in_block = i % kVectors * 8;
      if (token >= p.n) continue;
      float sum[8] = {};
#pragma unroll 2
      for (int slice = 0; slice < slices; ++slice) {
        const auto* from = reinterpret_cast<const float4*>(at(p, first_slot + slice, token, in_block));
        const float4 low = __ldcg(from), high = __ldcg(from + 1);
        sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
        sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
      }
      store(p, token, int64_t{note.y} * kBlock + in_block, sum);
    }
  }

  __device__ static void store(const Args& p, int token, int64_t output, const float (&sum)[8]) {
    using T = typename K::Element;
    if constexpr (K::plain) {
      if (output >= p.outputs) return;
      *reinterpret_cast<uint4*>(p.finish.at<T>(token, output)) = {
          narrow_pair(sum[0], sum[1], T{}), narrow_pair(sum[2], sum[3], T{}), narrow_pair(sum[4], sum[5], T{}),
          narrow_pair(sum[6], sum[7], T{})};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (output + i < p.outputs) p.finish.store<T>(token, output + i, sum[i]);
      }
    }
  }

  int turn_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
