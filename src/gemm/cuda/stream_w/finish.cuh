// How the kernel for few tokens ends. The sums of a thread block's warps become y or, for a slice of a split row,
// partial sums in the workspace. stream_w_combine() adds those.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/stream_w/tile.cuh"

namespace blocksparse::gemm::stream_w {
namespace {

template <class T>
__device__ inline void store_pair(T* at, T low, T high) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(at) = low.bits | static_cast<uint32_t>(high.bits) << 16;
  } else {
    *reinterpret_cast<float2*>(at) = {low, high};
  }
}

// Finishes and stores two neighbouring outputs, `in_block` within the piece's block.
template <class T>
__device__ inline void finish_pair(const Args& p, int32_t block_size, int32_t to, int token, int in_block, float2 sum) {
  const int64_t output = int64_t{to} * block_size + in_block;
  if (output >= p.outputs) return;
  if (p.plain) {
    store_pair(p.finish.at<T>(token, output), narrow<T>(sum.x), narrow<T>(sum.y));
    return;
  }
  const bool both = output + 1 < p.outputs;
  const T low = p.finish.value<T>(token, output, sum.x);
  const T high = both ? p.finish.value<T>(token, output + 1, sum.y) : T{};
  T* at = p.finish.at<T>(token, output);
  if (p.y_pairs) {
    store_pair(at, low, high);
  } else {
    *at = low;
    if (both) at[p.finish.y.feature_stride] = high;
  }
}

// Finishes and stores two neighbouring features of a gated linear unit; `in_block` is the place of the first one's
// gate.
template <class T>
__device__ inline void finish_glu_pair(const Args& p, int32_t block_size, int32_t to, int token, int in_block,
                                       float2 gate, float2 up) {
  const int64_t output = int64_t{to} * block_size + in_block, feature = feature_of(output);
  if (feature >= p.finish.hidden) return;
  const bool both = feature + 1 < p.finish.hidden;
  const T low = narrow<T>(p.finish.glu<T>(output, gate.x, up.x));
  const T high = both ? narrow<T>(p.finish.glu<T>(output + 1, gate.y, up.y)) : T{};
  T* at = p.finish.at<T>(token, feature);
  if (p.y_pairs) {
    store_pair(at, low, high);
  } else {
    *at = low;
    if (both) at[1] = high;
  }
}

// The epilogue of a gated linear unit: half as many results as sums.
template <class K, int Warps>
__device__ inline void finish_glu(const Args& p, const Piece& piece, int strip, const float* staged) {
  constexpr int kPairs = K::Tile::kOutputs / 4;
  const int first_token = Slice<K::tokens>(p).first;
  for (int e = static_cast<int>(threadIdx.x); e < K::tokens * kPairs; e += 32 * Warps) {
    const int in_tile = e / kPairs, column = gate_column(e % kPairs * 2), token = first_token + in_tile;
    const float* from = staged + in_tile * K::staged_row + column;
    float2 gate = {0, 0}, up = {0, 0};
#pragma unroll
    for (int warp = 0; warp < Warps; ++warp, from += K::tokens * K::staged_row) {
      gate.x += from[0], gate.y += from[1];
      up.x += from[kInterleaved], up.y += from[kInterleaved + 1];
    }
    if (token >= p.n) continue;
    const int in_block = strip * K::Tile::kOutputs + column;
    finish_glu_pair<typename K::Element>(p, K::block, piece.to, token, in_block, gate, up);
  }
}

// Adds the sums of the warps, in the order of warps. All reads are under way before the first store. One after the
// other they would take 2 us (n = 32), as long as a list of 8 blocks.
template <class K, int Warps>
__device__ inline void finish(const Args& p, const Piece& piece, int strip, const float* staged) {
  constexpr int kPairs = K::Tile::kOutputs / 2, kStep = 32 * Warps, kItems = ceil_div(K::tokens * kPairs, kStep);
  const bool slice = p.partial != nullptr && piece.slot >= 0;
  if constexpr (K::Tile::kOutputs >= 2 * kInterleaved && sizeof(typename K::Element) == 2) {
    if (p.finish.hidden > 0 && !slice) return finish_glu<K, Warps>(p, piece, strip, staged);
  }
  const bool by_output = slice || p.finish.y.features_contiguous();
  const int first_token = Slice<K::tokens>(p).first;
  const auto token_of = [&](int e) { return by_output ? e / kPairs : e % K::tokens; };
  const auto output_of = [&](int e) { return (by_output ? e % kPairs : e / K::tokens) * 2; };
  float2 sums[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kStep;
    if (e >= K::tokens * kPairs) break;
    const float* from = staged + token_of(e) * K::staged_row + output_of(e);
    sums[i] = {0, 0};
#pragma unroll
    for (int warp = 0; warp < Warps; ++warp, from += K::tokens * K::staged_row) {
      sums[i].x += from[0], sums[i].y += from[1];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kStep, token = first_token + token_of(e);
    if (e >= K::tokens * kPairs || token >= p.n) continue;
    const int in_block = strip * K::Tile::kOutputs + output_of(e);
    if (slice) {
      const int64_t at = (int64_t{piece.slot} * p.n + token) * K::block + in_block;
      *reinterpret_cast<float2*>(p.partial + at) = sums[i];
    } else {
      finish_pair<typename K::Element>(p, K::block, piece.to, token, in_block, sums[i]);
    }
  }
}

constexpr int kCombineThreads = 256;

// The sum of two neighbouring outputs over the slices, in the order of slots.
__device__ inline float2 sum_of_slices(const Args& p, const Split& split, int32_t width, int32_t inner) {
  float2 sum = {0, 0};
  constexpr int kAtOnce = 8;  // reads that are under way together
  for (int32_t slot = 0; slot < split.slots; slot += kAtOnce) {
    float2 part[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int32_t at = split.first_slot + min(slot + k, split.slots - 1);
      part[k] = *reinterpret_cast<const float2*>(p.partial + at * width + inner);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (slot + k < split.slots) sum.x += part[k].x, sum.y += part[k].y;
    }
  }
  return sum;
}

// Adds the slices of split rows in the order of slots. The tables do not change, so they may be read at once: the
// kernel before has waited for all earlier ones.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) stream_w_combine(const __grid_constant__ Args p, int32_t block) {
  const int32_t width = p.n * block, count = p.walk.counts[1] * (width / 2);
  auto i = static_cast<int32_t>(blockIdx.x * kCombineThreads + threadIdx.x);
  Split split = i < count ? p.walk.splits[i / (width / 2)] : Split{};
  ptx::griddepcontrol_wait();
  while (i < count) {
    const int32_t inner = i % (width / 2) * 2, token = inner / block, in_block = inner % block;
    if (p.finish.hidden == 0) {
      finish_pair<T>(p, block, split.to, token, in_block, sum_of_slices(p, split, width, inner));
    } else if (is_gate(in_block)) {
      const float2 gate = sum_of_slices(p, split, width, inner);
      const float2 up = sum_of_slices(p, split, width, inner + static_cast<int32_t>(kInterleaved));
      finish_glu_pair<T>(p, block, split.to, token, in_block, gate, up);
    }
    i += static_cast<int32_t>(gridDim.x) * kCombineThreads;
    if (i < count) split = p.walk.splits[i / (width / 2)];
  }
}

}  // namespace
}  // namespace blocksparse::gemm::stream_w
