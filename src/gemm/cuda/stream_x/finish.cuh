// The last step of the kernel `stream_x`: the sums of a warp's row of blocks become y.
//
// b = 16 and 32: a lane has one output of each eighth of the row, for two tokens. movmatrix turns these into kEach
// neighbouring outputs of one token, the order of y and the residual. b = 8: sums are in that order from the start.
#pragma once

#include "cuda/ptx/load.h"
#include "cuda/ptx/movmatrix.h"
#include "gemm/cuda/approximate.cuh"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/stream_x/tile.cuh"

namespace blocksparse::gemm::stream_x {
namespace {

// Outputs from `output` on, of which `inside` exist.
struct Target {
  int64_t token, output, inside;
};

template <class T, int Words>
__device__ inline void load_words(const DeviceMatrix& m, const Target& at, uint32_t (&words)[Words]) {
  const T* from = m.at<T>(at.token, at.output);
  if (m.aligned && m.features_contiguous() && at.inside >= 2 * Words) {
    if constexpr (Words == 4) ptx::ld_stream_16(words, from);
    if constexpr (Words == 2) ptx::ld_stream_8(words, from);
    if constexpr (Words == 1) ptx::ld_stream_4(words, from);
    return;
  }
#pragma unroll
  for (int k = 0; k < 2 * Words; ++k) {
    const uint32_t bits = k < at.inside ? from[k * m.feature_stride].bits : 0;
    words[k / 2] = k % 2 == 0 ? bits : words[k / 2] | bits << 16;
  }
}

template <class T, int Words>
__device__ inline void store_words(const DeviceMatrix& m, const Target& at, const uint32_t (&words)[Words]) {
  T* to = m.at<T>(at.token, at.output);
  if (m.aligned && m.features_contiguous() && at.inside >= 2 * Words) {
    if constexpr (Words == 4) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    if constexpr (Words == 2) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    if constexpr (Words == 1) *reinterpret_cast<uint32_t*>(to) = words[0];
    return;
  }
#pragma unroll
  for (int k = 0; k < 2 * Words; ++k) {
    if (k < at.inside) to[k * m.feature_stride].bits = static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
  }
}

// The sums of a lane that make a word of y, in each tile of 8 tokens: word(tile, word of the lane) points to two sums.
template <class K>
struct Output {
  static constexpr int kEach = K::block / 4, kWords = K::kEights;
  Sums<K>& sums;

  __device__ float* word(int t, int e) const {
    if constexpr (K::block == 8) return sums[0][t / 2] + t % 2 * 2;
    else return sums[e / 2][t] + e % 2 * 2;
  }
  // Converts a word between the order of the sums and that of y, either way.
  __device__ static uint32_t turned(uint32_t word) {
    if constexpr (K::block == 8) return word;
    else return ptx::movmatrix_trans(word);
  }
};

template <class K>
__device__ inline void add_bias(const Output<K>& y, const void* bias, int64_t first, int64_t outputs) {
  using T = typename K::Element;
  const auto* from = static_cast<const T*>(bias);
  const int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
  for (int e = 0; e < K::kEights; ++e) {
    float of[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t output = first + (K::block == 8 ? 2 * q + i : output_of<K>(e, g));
      of[i] = output < outputs ? widen(from[output]) : 0;
    }
#pragma unroll
    for (int t = 0; t < K::kTiles; ++t) y.word(t, e)[0] += of[0], y.word(t, e)[1] += of[1];
  }
}

template <Activation Act, class K>
__device__ inline void activate(const Output<K>& y) {
#pragma unroll
  for (int t = 0; t < K::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2 * K::kEights; ++i) {
      float& sum = y.word(t, i / 2)[i % 2];
      sum = approximately_activated<Act>(sum);
    }
  }
}

// Where the lane's word of each tile of 8 tokens lies, for a row of blocks. Sides are shorter than 2^31 (supports).
template <class K>
struct Corner {
  int token, output, tokens_inside, inside;

  __device__ Corner(int n, int64_t outputs, int first_token, int row)
      : token(first_token + lane_id() / 4),
        output(row * K::block + lane_id() % 4 * Output<K>::kEach),
        tokens_inside(n - token),
        inside(static_cast<int>(outputs) - output) {}
  __device__ Target tile(int t) const { return {token + 8 * t, output, inside}; }
  __device__ bool has(int t) const { return inside > 0 && 8 * t < tokens_inside; }
};

// Sums begin with the residual. 4096 x 4096, 4096 tokens, b = 32, density .25, hot, H200, 2026-11-24: 120 us. Read
// after the products it took 145.
template <class K>
__device__ inline void begin_with(const DeviceMatrix& residual, const Corner<K>& at, Sums<K>& sums) {
  using T = typename K::Element;
  const Output<K> y{sums};
  uint32_t words[K::kTiles][K::kEights] = {};
#pragma unroll
  for (int t = 0; t < K::kTiles; ++t) {
    if (at.has(t)) load_words<T>(residual, at.tile(t), words[t]);
  }
#pragma unroll
  for (int t = 0; t < K::kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < K::kEights; ++e) {
      const uint32_t word = y.turned(words[t][e]);
      y.word(t, e)[0] = widen(T{static_cast<uint16_t>(word)});
      y.word(t, e)[1] = widen(T{static_cast<uint16_t>(word >> 16)});
    }
  }
}

template <class K>
__device__ inline void finish_row(const Finish& f, const Corner<K>& at, int64_t first_output, int64_t outputs,
                                  Sums<K>& sums) {
  using T = typename K::Element;
  const Output<K> y{sums};
  if (f.bias != nullptr) add_bias(y, f.bias, first_output, outputs);
  switch (f.activation) {
    case Activation::none: break;
    case Activation::relu: activate<Activation::relu>(y); break;
    case Activation::gelu: activate<Activation::gelu>(y); break;
    case Activation::silu: activate<Activation::silu>(y); break;
    case Activation::gelu_tanh: activate<Activation::gelu_tanh>(y); break;
  }
#pragma unroll
  for (int t = 0; t < K::kTiles; ++t) {
    uint32_t words[K::kEights];
#pragma unroll
    for (int e = 0; e < K::kEights; ++e) {
      const float* sum = y.word(t, e);
      words[e] = y.turned(narrow_pair(sum[0], sum[1], T{}));
    }
    if (at.has(t)) store_words<T>(f.y, at.tile(t), words);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::stream_x
