// A tile of fprop and dgrad in the kernel `tiled_f32`, and its products: see product.cuh.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/tiled_f32/tiled.cuh"

namespace blocksparse::gemm::tiled_f32 {
namespace {

// Config. Inner: the block size, or 32 for larger blocks.
template <int Inner, bool ByIn, bool Tf32_>
struct Kernel {
  // Segments of a stage, patches of a segment.
  static constexpr int inner = Inner, segments = 32 / Inner, patches = kOutputs / Inner;
  static constexpr bool by_in = ByIn, tf32 = Tf32_;
  static constexpr int stages = 3;
  static constexpr int x_bytes = kTokens * 32 * 4, patch_bytes = Inner * Inner * 4;
  static constexpr int stage_bytes = x_bytes + kOutputs * 32 * 4;
  static constexpr int words = segments * patches;  // words of a stage's notes: the blocks, followed by the inputs
  static constexpr int note_bytes = ceil_div(words + segments, 4) * 16, notes = 8;
  static constexpr int shared_bytes = stages * stage_bytes + notes * note_bytes;
  static constexpr int pitch = kOutputs + 4;
  static_assert(kTokens * pitch * 4 <= stages * stage_bytes, "sums take the place of the stages");
};

__device__ inline int note_word(uint32_t note, int i) { return __float_as_int(ptx::ld_shared_4(note + 4 * i)); }

// The patches that exist: bit c of word c / 32.
template <class K>
struct Patches {
  static constexpr int kWords = ceil_div(K::words, 32);
  uint32_t bits[kWords];

  __device__ explicit Patches(uint32_t note) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int patch = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      const bool mine = patch < K::words && note_word(note, patch) > 0;
      bits[i] = __ballot_sync(~0u, mine);
    }
  }
  __device__ bool has(int patch) const { return (bits[patch / 32] >> patch % 32 & 1) != 0; }
  __device__ bool any(int segment) const {
    if constexpr (K::patches == 16) return (bits[segment / 2] >> segment % 2 * 16 & 0xffff) != 0;
    else if constexpr (K::patches == 8) return (bits[0] >> segment * 8 & 0xff) != 0;
    else return true;
  }
};

// ---- Compute --------------------------------------------------------------------------------------------------------

template <class K>
class Tf32Sums {
 public:
  __device__ void add(const Patches<K>& patches, uint32_t stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const int first = static_cast<int>(threadIdx.x) / 32 * 32;  // first token of the warp
#pragma unroll
    for (int s = 0; s < K::segments; ++s) {
      if (!patches.any(s)) continue;
      const uint32_t x = stage + (s * kTokens + first) * (K::inner * 4);
#pragma unroll
      for (int half = 0; half < (K::inner == 32 ? 2 : 1); ++half) {
        uint32_t a[2][kSteps][4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // rows g + 8 r
          float f[2 * kSteps];
          if constexpr (K::inner == 8) read(f, x + (g + 8 * r) * 32 + 8 * t);
          else read(f, x + place_in_rows<K::inner>(g, 4 * half + t, 8 * r));
#pragma unroll
          for (int i = 0; i < 2 * kSteps; ++i) a[r / 2][i / 2][r % 2 + i % 2 * 2] = rounded_to_tf32(f[i]);
        }
#pragma unroll
        for (int c = 0; c < K::patches; ++c) {
          if (!patches.has(s * K::patches + c)) continue;
          add_patch(c, a, stage + K::x_bytes + (s * K::patches + c) * K::patch_bytes, half);
        }
      }
    }
  }

  template <class Body>
  __device__ void for_each(Body body) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const int token = static_cast<int>(threadIdx.x) / 32 * 32 + g;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = 2 * t + c % 2, patch = j / kTiles, in_patch = j % kTiles;
          const int output = K::by_in ? kTiles * column + in_patch : 8 * in_patch + column;
          body(token + 16 * m + c / 2 * 8, patch * K::inner + output, sum_[m][j][c]);
        }
      }
    }
  }

 private:
  static constexpr int kSteps = K::inner == 8 ? 1 : 2;  // steps of 8 inputs
  static constexpr int kTiles = K::inner / 8;           // tiles of 8 outputs of a patch

  __device__ void add_patch(int c, const uint32_t (&a)[2][kSteps][4], uint32_t w, int half) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    uint32_t b[kTiles][kSteps][2];
    if constexpr (!K::by_in) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        float f[2 * kSteps];
        if constexpr (K::inner == 8) read(f, w + g * 32 + 8 * t);
        else read(f, w + place_in_rows<K::inner>(g, 4 * half + t, 8 * j));
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) b[j][i / 2][i % 2] = rounded_to_tf32(f[i]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k) {
        float f[kTiles];
        if constexpr (K::inner == 8) f[0] = ptx::ld_shared_4(w + (4 * k + t) * 32 + 4 * g);
        else read_column<K::inner>(f, w + half * (16 * K::inner * 4), k);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) b[j][k / 2][k % 2] = rounded_to_tf32(f[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < 2; ++m) ptx::mma_m16n8k8_tf32(sum_[m][c * kTiles + j], a[m][s], b[j][s][0], b[j][s][1]);
      }
    }
  }

  float sum_[2][16][4] = {};
};

// A lane has 8 tokens and an eighth of the outputs of every patch. Its bits are assigned so that half-warps read pairs
// of equal addresses, which shared memory serves at once.
template <class K>
class F32Sums {
 public:
  __device__ F32Sums() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    first_ = static_cast<int>(threadIdx.x) / 32 * 32;
    token_ = (lane & 1) + (lane >> 1 & 2);
    output_ = (lane >> 1 & 1) + (lane >> 2 & 6);
  }

  __device__ void add(const Patches<K>& patches, uint32_t stage) {
#pragma unroll
    for (int s = 0; s < K::segments; ++s) {
      if (!patches.any(s)) continue;
      const uint32_t x = stage + (s * kTokens + first_) * (K::inner * 4);
#pragma unroll 1
      for (int v = 0; v < K::inner / 4; ++v) {
        float a[8][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) read_4(a[i], x + place_in_rows<K::inner>(token_, v, 4 * i));
#pragma unroll
        for (int c = 0; c < K::patches; ++c) {
          if (patches.has(s * K::patches + c)) {
            add_patch(c, a, stage + K::x_bytes + (s * K::patches + c) * K::patch_bytes, v);
          }
        }
      }
    }
  }

  template <class Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int patch = j / kMine, in_patch = K::by_in ? kMine * output_ + j % kMine : output_ + j % kMine * 8;
        body(first_ + token_ + 4 * i, patch * K::inner + in_patch, sum_[i][j]);
      }
    }
  }

 private:
  static constexpr int kMine = K::inner / 8;  // outputs of a patch

  __device__ void add_patch(int c, const float (&a)[8][4], uint32_t w, int v) {
    float b[4][kMine];
    if constexpr (!K::by_in) {
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        float f[4];
        read_4(f, w + place_in_rows<K::inner>(output_, v, 8 * j));
#pragma unroll
        for (int k = 0; k < 4; ++k) b[k][j] = f[k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int input = 4 * v + k, vector = output_ * kMine / 4;
        const int place =
            K::inner == 8 ? place_in_small_columns(input, vector) : place_in_columns<K::inner>(input, vector);
        read(b[k], w + place + output_ * kMine % 4 * 4);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < kMine; ++j) sum_[i][c * kMine + j] = fmaf(a[i][k], b[k][j], sum_[i][c * kMine + j]);
      }
    }
  }

  int first_, token_, output_;  // the first token of the warp, and where this lane begins
  float sum_[8][16] = {};
};

}  // namespace
}  // namespace blocksparse::gemm::tiled_f32
