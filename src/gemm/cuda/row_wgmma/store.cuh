// How the kernel `row_wgmma` ends. The sums of a job become y or, for a slice of a cut row, partial sums in the
// workspace. A kernel after it adds those.
#pragma once

#include "cuda/ptx/movmatrix.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/row_wgmma/feed.cuh"
#include "gemm/cuda/store_rows.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

template <class K>
using Sums = float[K::kHalves][K::kSums];

// Stores a lane's sums of a job. Of each tile of 16 tokens x 8 outputs, wgmma gives the lane tokens lane / 4 and lane /
// 4 + 8, outputs 2 (lane % 4) and the next.
template <class K>
class Storer {
  using T = typename K::Element;

 public:
  // `staged`: kStoreBytes of this warpgroup.
  __device__ Storer(const Args& p, const Job& job, uint32_t staged) : p_(p), job_(job), staged_(staged) {}

  __device__ void store(Sums<K>& sums) const {
    if (job_.slot >= 0) return leave_slice(sums);
    if (!p_.plain) finish(sums);
    const DeviceMatrix& y = p_.finish.y;
    const bool in_rows = K::kStoreBytes > 0 && y.features_contiguous() && y.aligned && p_.outputs % 8 == 0;
    if (in_rows) store_rows(sums);
    else if (y.features_contiguous()) store_in<false>(sums);
    else store_in<true>(sums);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // The first of 8 tokens: `row` 0 or 1 of this warp's 16 tokens.
  __device__ int first_token(int half, int row) const {
    return job_.token + half * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + row * 8;
  }
  __device__ int token_of(int half, int i) const { return first_token(half, i / 2 % 2) + lane() / 4; }
  __device__ static int column_of(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }
  __device__ int64_t first_output() const { return int64_t{job_.to} * K::block; }

  __device__ void leave_slice(const Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < K::kSums; i += 2) {
        if (token_of(half, i) >= p_.n) continue;
        const int64_t at = (int64_t{job_.slot} * p_.n + token_of(half, i)) * K::block + column_of(i);
        *reinterpret_cast<float2*>(p_.partial + at) = {sums[half][i], sums[half][i + 1]};
      }
    }
  }

  // Adds bias and residual, applies the activation.
  __device__ void finish(Sums<K>& sums) const {
    if (p_.finish.bias != nullptr) add_bias(sums);
    if (p_.finish.residual.data != nullptr) add_residual(sums);
    switch (p_.finish.activation) {
      case Activation::none: break;
      case Activation::relu: return activate<Activation::relu>(sums);
      case Activation::gelu: return activate<Activation::gelu>(sums);
      case Activation::silu: return activate<Activation::silu>(sums);
      case Activation::gelu_tanh: return activate<Activation::gelu_tanh>(sums);
    }
  }

  template <Activation Act>
  __device__ static void activate(Sums<K>& sums) {
#pragma unroll
    for (auto& half : sums) {
#pragma unroll
      for (float& sum : half) sum = approximately_activated<Act>(sum);
    }
  }

  __device__ void add_bias(Sums<K>& sums) const {
    const T* bias = static_cast<const T*>(p_.finish.bias) + first_output();
    const int inside = static_cast<int>(min(int64_t{K::block}, p_.outputs - first_output()));
#pragma unroll
    for (int i = 0; i < K::kSums; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_column = column_of(i + e) < inside ? widen(bias[column_of(i + e)]) : 0;
#pragma unroll
        for (auto& half : sums) half[i + e] += of_column, half[i + e + 2] += of_column;
      }
    }
  }

  // Reads two outputs in one access if they lie side by side. With single accesses the last product of a step (18432
  // outputs, 256 tokens) took 110 us instead of 23 (H200, 2026-11-26).
  __device__ void add_residual(Sums<K>& sums) const {
    const DeviceMatrix& residual = p_.finish.residual;
    const bool pairs = residual.features_contiguous() && residual.aligned && first_output() + K::block <= p_.outputs;
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int token = first_token(half, row) + lane() / 4;
        if (token >= p_.n) continue;
        const T* from = residual.at<T>(token, first_output() + lane() % 4 * 2);
#pragma unroll
        for (int i = 2 * row; i < K::kSums; i += 4) {
          if (pairs) {
            const auto pair = *reinterpret_cast<const uint32_t*>(from + i / 4 * 8);
            sums[half][i] += widen(T{static_cast<uint16_t>(pair)});
            sums[half][i + 1] += widen(T{static_cast<uint16_t>(pair >> 16)});
            continue;
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t output = first_output() + column_of(i + e);
            if (output < p_.outputs) sums[half][i + e] += widen(*residual.at<T>(token, output));
          }
        }
      }
    }
  }

  __device__ void store_rows(const Sums<K>& sums) const {
    const uint32_t own = staged_ + threadIdx.x % 128 / 32 * 16 * K::block * 2;
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
      const int token = first_token(half, 0);
      gemm::store_rows<T, K::block>(own, sums[half], p_.finish.at<T>(token, first_output()), p_.finish.y.token_stride,
                                    p_.n - token, p_.outputs - first_output());
    }
  }

  // A lane stores 8 outputs of a token at a time or, Turned, 8 tokens of an output.
  template <bool Turned>
  __device__ void store_in(const Sums<K>& sums) const {
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
      for (int first = 0; first < K::block; first += 32) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* sum = sums[half] + first / 2 + 4 * j + 2 * row;
            words[j] = narrow_pair(sum[0], sum[1], T{});
            if constexpr (Turned) words[j] = ptx::movmatrix_trans(words[j]);
          }
          cuda::turn_quad(words);
          const int inside = lane() / 4, token = first_token(half, row) + (Turned ? 0 : inside);
          put<Turned>(token, first_output() + first + lane() % 4 * 8 + (Turned ? inside : 0), words);
        }
      }
    }
  }

  template <bool Turned>
  __device__ void put(int token, int64_t output, const uint32_t (&words)[4]) const {
    const int64_t inside = Turned ? p_.n - token : p_.outputs - output;
    if (inside <= 0 || (Turned ? output >= p_.outputs : token >= p_.n)) return;
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
  const Job& job_;
  uint32_t staged_;
};

constexpr int kCombineThreads = 256;

// Adds the slices of cut rows in the order of slots. A thread adds two outputs of a token.
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
    float2 sum = {0, 0};
#pragma unroll 4
    for (int slot = 0; slot < split.slots; ++slot) {
      const float2 part = __ldcg(from + slot * width);
      sum.x += part.x, sum.y += part.y;
    }
    const int64_t token = inner / kPairs, output = int64_t{split.to} * Block + inner % kPairs * 2;
    if (output < p.outputs) p.finish.store<T>(token, output, sum.x);
    if (output + 1 < p.outputs) p.finish.store<T>(token, output + 1, sum.y);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
