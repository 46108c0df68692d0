// Tiles of f32 multiplied by tensor cores in tf32. A patch is 16 inputs of up to 32 outputs, as many bytes as 32 inputs
// of 16 bits. mma wants no two neighbouring inputs in a lane, so if W is read transposed a lane loads neighbouring
// outputs and nothing is transposed. Operands are rounded when they are multiplied.
#pragma once

#include "gemm/cuda/stream_w/tile.cuh"

namespace blocksparse::gemm::stream_w {
namespace {

template <bool Gated>
__device__ inline void add_tf32_product(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float gate) {
  if constexpr (Gated) {
    float products[4] = {};
    ptx::mma_m16n8k8_tf32(products, a, b[0], b[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += gate * products[i];
  } else {
    ptx::mma_m16n8k8_tf32(sum, a, b[0], b[1]);
  }
}

__device__ inline uint32_t to_tf32(uint32_t bits) { return rounded_to_tf32(__uint_as_float(bits)); }

// b >= 16. W: inputs 4 t to 4 t + 3 of outputs g, g + 8, ...; by_in, outputs kWide g to kWide g + kWide - 1 of those
// inputs. x: those inputs of tokens g, g + 8, ...
template <int B, int N, bool ByIn>
struct Tile<float, B, N, ByIn> {
  static constexpr int kOutputs = B < 32 ? B : 32, kStrips = B / kOutputs, kDepth = 16, kPatches = B / kDepth;
  static constexpr int kWide = kOutputs / 8, kTiles = kOutputs / 16;
  static constexpr int kWordsW = kOutputs / 2, kWordsX = N / 2, kSums = kTiles * (N / 8);
  static constexpr int kPad = ByIn && kOutputs == 32 ? 1 : 4;
  static constexpr bool kReadyOffsets = B == 16;
  static constexpr bool kPacked = B == 16;  // b = 16 is always packed
  const char *w, *x;
  uint32_t row[kPacked ? 1 : N / 8];

  __device__ explicit Tile(const Args& p) {
    const int g = lane_row(), t = lane_column();
    w = static_cast<const char*>(p.w) + (ByIn ? 4 * t * B + kWide * g : g * B + 4 * t) * 4;
    const Slice<N> slice(p);
    x = static_cast<const char*>(p.x) + slice.packed_bytes + 16 * t;
    if constexpr (kPacked) {
      row[0] = 64 * g;
    } else {
      const int first = slice.first_in_x(p), last = slice.last_in_x(p);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) row[j] = static_cast<uint32_t>(min(first + 8 * j + g, last)) * p.x_token_bytes;
    }
  }

  // Offsets of W in units of 64 bytes, of x in units of 16.
  __device__ static uint32_t w_offset(int weight, int strip, int patch) {
    return static_cast<uint32_t>(weight) * (B * B / 16) +
           static_cast<uint32_t>(ByIn ? patch * B + strip * 2 : strip * 2 * B + patch);
  }
  __device__ static uint32_t x_offset(const Args& p, int from, int patch) {
    return static_cast<uint32_t>(from * kPatches + patch) * p.x_patch_vectors;
  }

  __device__ void load_w(uint32_t (&f)[kWordsW], uint32_t offset) const {
    const char* from = w + static_cast<uint64_t>(offset) * 64;
    if constexpr (!ByIn) {
#pragma unroll
      for (int r = 0; r < kOutputs / 8; ++r) ptx::ld_stream_16(f + 4 * r, from + r * 32 * B);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kWide == 4) ptx::ld_stream_16(f + 4 * k, from + k * 4 * B);
        else ptx::ld_stream_8(f + 2 * k, from + k * 4 * B);
      }
    }
  }
  __device__ void load_x(uint32_t (&f)[kWordsX], uint32_t offset) const {
    const char* from = x + static_cast<uint64_t>(offset) * 16;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) ptx::ld_16(f + 4 * j, from + (kPacked ? row[0] + 512 * j : row[j]));
  }
  __device__ static void clear_w_beyond(uint32_t (&f)[kWordsW], int left) {
    clear_beyond<false>(f, left, [](int i) { return 4 * lane_column() + (ByIn ? i / kWide : i % 4); });
  }

  template <bool Gated>
  __device__ static void multiply(const uint32_t (&w)[kWordsW], const uint32_t (&x)[kWordsX], float (&sum)[kSums][4],
                                  float gate) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {  // inputs 4 t + 2 s, 4 t + 2 s + 1
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * m + i % 2, input = 2 * s + i / 2;
          a[m][i] = to_tf32(w[ByIn ? kWide * input + row : 4 * row + input]);
        }
      }
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const uint32_t b[2] = {to_tf32(x[4 * j + 2 * s]), to_tf32(x[4 * j + 2 * s + 1])};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) add_tf32_product<Gated>(sum[m * (N / 8) + j], a[m], b, gate);
      }
    }
  }
  // Stages the sums of tokens 8 j ... 8 j + 7 as [8, kOutputs + kPad].
  __device__ static void stage(const float (&sum)[kSums][4], int j, float* to) {
    const int g = lane_row(), t = lane_column();
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int output = ByIn ? kWide * g + 2 * m + c / 2 : 16 * m + 8 * (c / 2) + g;
        to[(2 * t + c % 2) * (kOutputs + kPad) + output] = sum[m * (N / 8) + j][c];
      }
    }
  }
};

// b = 8: inputs 2 t and 2 t + 1; tokens are mma's rows. x is packed.
template <int N, bool ByIn>
struct Tile<float, 8, N, ByIn> {
  static constexpr int kOutputs = 8, kStrips = 1, kDepth = 8, kPatches = 1;
  static constexpr int kWordsW = 2, kWordsX = N / 4, kSums = N / 16;
  static constexpr int kPad = 0;
  static constexpr bool kReadyOffsets = true;
  static_assert(N >= 16);
  const char *w, *x;

  __device__ explicit Tile(const Args& p) {
    const int g = lane_row(), t = lane_column();
    w = static_cast<const char*>(p.w) + (ByIn ? 2 * t * 8 + g : g * 8 + 2 * t) * 4;
    x = static_cast<const char*>(p.x) + Slice<N>(p).packed_bytes + (4 * g + t) * 8;
  }
  __device__ static uint32_t w_offset(int weight, int, int) { return static_cast<uint32_t>(weight) * 4; }
  __device__ static uint32_t x_offset(const Args& p, int from, int) {
    return static_cast<uint32_t>(from) * p.x_patch_vectors;
  }

  __device__ void load_w(uint32_t (&f)[kWordsW], uint32_t offset) const {
    const char* from = w + static_cast<uint64_t>(offset) * 64;
    if constexpr (ByIn) ptx::ld_stream_4(f, from), ptx::ld_stream_4(f + 1, from + 32);
    else ptx::ld_stream_8(f, from);
  }
  __device__ void load_x(uint32_t (&f)[kWordsX], uint32_t offset) const {
    const char* from = x + static_cast<uint64_t>(offset) * 16;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) ptx::ld_8(f + 2 * j, from + 256 * j);
  }
  __device__ static void clear_w_beyond(uint32_t (&f)[kWordsW], int left) {
    clear_beyond<false>(f, left, [](int i) { return 2 * lane_column() + i; });
  }

  template <bool Gated>
  __device__ static void multiply(const uint32_t (&w)[kWordsW], const uint32_t (&x)[kWordsX], float (&sum)[kSums][4],
                                  float gate) {
    const uint32_t b[2] = {to_tf32(w[0]), to_tf32(w[1])};
#pragma unroll
    for (int m = 0; m < kSums; ++m) {
      const uint32_t a[4] = {to_tf32(x[4 * m]), to_tf32(x[4 * m + 2]), to_tf32(x[4 * m + 1]), to_tf32(x[4 * m + 3])};
      add_tf32_product<Gated>(sum[m], a, b, gate);
    }
  }
  __device__ static void stage(const float (&sum)[kSums][4], int j, float* to) {
#pragma unroll
    for (int c = 0; c < 2; ++c) to[lane_row() * kOutputs + 2 * lane_column() + c] = sum[j / 2][j % 2 * 2 + c];
  }
};

}  // namespace
}  // namespace blocksparse::gemm::stream_w
