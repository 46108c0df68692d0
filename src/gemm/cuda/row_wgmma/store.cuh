// How the kernel `row_wgmma` ends: the sums of a job become y, or a slice of a cut row in the workspace; a kernel
// behind adds those.
#pragma once

#include "cuda/ptx/movmatrix.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/approximate.cuh"
#include "gemm/cuda/row_wgmma/feed.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

template <class K>
using Sums = float[K::kHalves][K::kSums];

// What becomes of a lane's sums of a job. wgmma gives it of each 16 x 8 tokens x outputs those of tokens lane / 4 (+ 8)
// and outputs 2 (lane % 4) (+ 1).
template <class K>
class Storer {
  using T = typename K::Element;

 public:
  __device__ Storer(const Args& p, const Note& note) : p_(p), note_(note) {}

  __device__ void store(Sums<K>& sums) const {
    if (note_.slot >= 0) return leave_slice(sums);
    if (p_.finish.hidden > 0) {
      finish_glu(sums);
      return store_in<false, K::block / 2>(sums);
    }
    if (!p_.plain) finish(sums);
    if (p_.finish.y.features_contiguous()) store_in<false>(sums);
    else store_in<true>(sums);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // The first of the 8 tokens in `row` 0 or 1 of this warp's 16.
  __device__ int first_token(int half, int row) const {
    return note_.token + half * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + row * 8;
  }
  __device__ int token_of(int half, int i) const { return first_token(half, i / 2 % 2) + lane() / 4; }
  __device__ static int column_of(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }
  __device__ int64_t first_output() const { return int64_t{note_.to} * K::block; }

  __device__ void leave_slice(const Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < K::kSums; i += 2) {
        if (token_of(half, i) >= p_.n) continue;
        const int64_t at = (int64_t{note_.slot} * p_.n + token_of(half, i)) * K::block + column_of(i);
        *reinterpret_cast<float2*>(p_.partial + at) = {sums[half][i], sums[half][i + 1]};
      }
    }
  }

  // Bias, residual, activation.
  __device__ void finish(Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < K::kSums; ++i) {
        const int token = token_of(half, i);
        const int64_t output = first_output() + column_of(i);
        if (token >= p_.n || output >= p_.outputs) continue;
        const float sum = p_.finish.before_activation<T>(token, output, sums[half][i]);
        sums[half][i] = activated(p_.finish.activation, sum);
      }
    }
  }

  // f(gate) * up takes the place of the first half of the sums. Eight columns on are four sums on.
  template <Activation Act>
  __device__ void finish_glu_by(Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < K::kSums / 2; ++i) {
        const int at = i / 4 * 8 + i % 4;
        sums[half][i] = approximately_activated<Act>(sums[half][at]) * sums[half][at + 4];
      }
    }
  }
  __device__ void add_bias(Sums<K>& sums) const {
    const T* bias = static_cast<const T*>(p_.finish.bias);
#pragma unroll
    for (int i = 0; i < K::kSums; i += 4) {
      const int64_t output = first_output() + column_of(i);
      if (output >= p_.outputs) continue;  // there are as many outputs as in whole eights
      const float low = widen(bias[output]), high = widen(bias[output + 1]);
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        sums[half][i] += low, sums[half][i + 1] += high;
        sums[half][i + 2] += low, sums[half][i + 3] += high;
      }
    }
  }
  __device__ void finish_glu(Sums<K>& sums) const {
    if (p_.finish.bias != nullptr) add_bias(sums);
    switch (p_.finish.activation) {
      case Activation::none: return finish_glu_by<Activation::none>(sums);
      case Activation::relu: return finish_glu_by<Activation::relu>(sums);
      case Activation::gelu: return finish_glu_by<Activation::gelu>(sums);
      case Activation::silu: return finish_glu_by<Activation::silu>(sums);
      case Activation::gelu_tanh: return finish_glu_by<Activation::gelu_tanh>(sums);
    }
  }

  // 8 outputs of a token, or, Turned, 8 tokens of an output, a lane and a time. Columns: of y, of a row of blocks.
  template <bool Turned, int Columns = K::block>
  __device__ void store_in(const Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int first = 0; first < Columns; first += 32) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            words[j] = 0;
            if (first + 8 * j >= Columns) continue;
            const float* sum = sums[half] + first / 2 + 4 * j + 2 * row;
            words[j] = narrow_pair(sum[0], sum[1], T{});
            if constexpr (Turned) words[j] = ptx::movmatrix_trans(words[j]);
          }
          cuda::turn_quad(words);
          const int inside = lane() / 4, token = first_token(half, row) + (Turned ? 0 : inside);
          const int column = first + lane() % 4 * 8;
          const int64_t output = int64_t{note_.to} * Columns + column + (Turned ? inside : 0);
          if (column < Columns) put<Turned>(token, output, Columns < K::block ? p_.finish.hidden : p_.outputs, words);
        }
      }
    }
  }

  template <bool Turned>
  __device__ void put(int token, int64_t output, int64_t outputs, const uint32_t (&words)[4]) const {
    const int64_t inside = Turned ? p_.n - token : outputs - output;
    if (inside <= 0 || (Turned ? output >= outputs : token >= p_.n)) return;
    T* to = p_.finish.at<T>(token, output);
    if (inside >= 8 && p_.finish.y.aligned) {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      return;
    }
    const int64_t step = Turned ? p_.finish.y.token_stride : p_.finish.y.feature_stride;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < inside) to[k * step].bits = static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
    }
  }

  const Args& p_;
  const Note& note_;
};

constexpr int kCombineThreads = 256;

// Adds the slices of cut rows in the order of slots, two outputs of a token a thread.
template <class T, int Block>
__global__ void __launch_bounds__(kCombineThreads) row_wgmma_combine(const __grid_constant__ Args p) {
  constexpr int kPairs = Block / 2;
  const int64_t width = int64_t{p.n} * kPairs;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t count = p.walk.counts[1] * width, step = int64_t{gridDim.x} * kCombineThreads;
  for (int64_t i = int64_t{blockIdx.x} * kCombineThreads + threadIdx.x; i < count; i += step) {
    const Split split = p.walk.splits[i / width];
    const int64_t inner = i % width;
    const auto* from = reinterpret_cast<const float2*>(p.partial) + split.first_slot * width + inner;
    const auto sum_of = [&](const float2* first) {
      float2 sum = {0, 0};
#pragma unroll 4
      for (int slot = 0; slot < split.slots; ++slot) {
        const float2 part = __ldcg(first + slot * width);
        sum.x += part.x, sum.y += part.y;
      }
      return sum;
    };
    const int64_t token = inner / kPairs, output = int64_t{split.to} * Block + inner % kPairs * 2;
    if (p.finish.hidden > 0) {
      if (!is_gate(output) || output >= p.outputs) continue;
      const float2 gate = sum_of(from), up = sum_of(from + kInterleaved / 2);
      p.finish.store_glu<T>(token, output, gate.x, up.x);
      p.finish.store_glu<T>(token, output + 1, gate.y, up.y);
      continue;
    }
    const float2 sum = sum_of(from);
    if (output < p.outputs) p.finish.store<T>(token, output, sum.x);
    if (output + 1 < p.outputs) p.finish.store<T>(token, output + 1, sum.y);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
