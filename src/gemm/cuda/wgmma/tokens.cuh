// b = 16, 32 (and 8): 128 tokens are wgmma's rows, the outputs of a patch its columns.
//   load      a box of x [128 tokens, 64 inputs], and one copy of the record's patches
//   compute   4 warpgroups, each with all tokens x a quarter of the bands. Each then has few patches to test; a test
//   that
//             skips a patch costs 25 clocks. 2 warpgroups of 64 tokens x all bands take 1.3x the time at density .1
#pragma once

#include "gemm/cuda/wgmma/finish.cuh"
#include "gemm/cuda/wgmma/maps.cuh"

namespace blocksparse::gemm::wgmma {
namespace {

template <XOrder Order>
struct TokensMaps {
  XMap<Order> x;
  YMap<Order> y;
};

template <class T, Kind Kind, XOrder Order>
struct TokenRows {
  using Maps = TokensMaps<Order>;
  static constexpr Form form = form_of(Kind);
  static constexpr bool x_first = Order == XOrder::features;
  static constexpr bool kFills = Kind == Kind::patches16;  // b = 8 is filled up
  static constexpr int kTokens = form.tokens, kGroups = form.parts, kThreads = (kGroups + 1) * 128;
  static constexpr int kBuffers = 1, kStagedBytes = kGroups * kBuffers * kBoxBytes;
  static constexpr int kXBytes = kTokens * kChunk * 2, kStageBytes = kXBytes + form.most_patches * form.patch_bytes();
  static constexpr int kStages = (226 * 1024 - kStagedBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStagedBytes + kStages * kStageBytes;
  static constexpr int kRegisters = 104, kFeedRegisters = 64;
  __device__ static Record no_record() { return {-1, 0, 0, 0}; }
  static constexpr int kBands = form.part_bands(), kOutputs = form.band_outputs, kHalves = kTokens / 64;
  static constexpr uint32_t kPartMask = (1u << form.part_bits()) - 1;
  static_assert(kStages <= kMostStages && form.part_bits() <= 16 && kBands * kOutputs == kBox && kHalves == 2);

  __device__ static uint32_t load(const Args& p, const Maps& maps, const Record& r, int token_tile, uint32_t stage,
                                  uint32_t full) {
    const auto bytes = static_cast<uint32_t>((__popc(r.a) + __popc(r.b)) * form.patch_bytes());
    load_x<Order, kTokens>(stage, maps.x, full, r.chunk * kChunk, token_tile * kTokens);
    ptx::load_bulk(stage + kXBytes, p.tables.patches + int64_t{r.c} * form.patch_bytes(), bytes, full);
    return kXBytes + bytes;
  }
  // {bits, bits, one byte a part: patches before those of the part, -}
  __device__ static int4 note(const Record& r) {
    const uint64_t all = static_cast<uint64_t>(static_cast<uint32_t>(r.b)) << 32 | static_cast<uint32_t>(r.a);
    int before = 0;
#pragma unroll
    for (int part = 1; part < form.parts; ++part) {
      before |= __popcll(all & ((uint64_t{1} << (part * form.part_bits())) - 1)) << 8 * part;
    }
    return {r.a, r.b, before, 0};
  }
  __device__ static uint32_t mask_of(const int4& note, int group) {
    const int shift = group * form.part_bits();
    return static_cast<uint32_t>(shift < 32 ? note.x >> shift : note.y >> (shift - 32)) & kPartMask;
  }
  __device__ static uint32_t before_of(const int4& note, int group) {
    return static_cast<uint32_t>(note.z >> 8 * group & 0xff);
  }

  struct Sums {
    float of[kHalves][kBands][kOutputs / 2];
  };

  // Each group is committed in its branch, so that the record's last patch stays in flight, not an empty group. If
  // there are 16 patches to test, 4 are tested together first: 102 us -> 94 (b = 16, density .1).
  __device__ static void multiply(Sums& sums, uint32_t stage, uint32_t mask, uint32_t before) {
    const uint64_t x = ptx::wgmma_matrix(stage, 0, 1024, ptx::Swizzle::bytes_128);
    const uint64_t none = ptx::wgmma_matrix(0, kOutputs * 16, 128, ptx::Swizzle::none);
    // 32 bits are stepped from patch to patch: 64 would take registers that are not left.
    uint32_t w = static_cast<uint32_t>(none) | (stage + kXBytes + before * form.patch_bytes()) >> 4;
#pragma unroll
    for (int first = 0; first < form.part_bits(); first += kBands) {
      if (kBands > 2 && (mask & ((1u << kBands) - 1) << first) == 0) continue;
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        if ((mask & 1u << (first + band)) == 0) continue;
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < form.patch_inputs / 16; ++k) {
          const uint64_t b = (none >> 32 << 32) | (w + k * kOutputs * 2);
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            constexpr int kEight = x_first ? 64 : 1;  // step to the next 8 inputs
            const int at = (first / kBands * (form.patch_inputs / 8) + k * 2) * kEight;
            ptx::wgmma<T, kOutputs, x_first, false>(sums.of[half][band], x + half * 512 + at, b);
          }
        }
        ptx::wgmma_commit();
        w += form.patch_bytes() / 16;
      }
    }
  }

  template <bool Plain>
  __device__ static void finish(const Args& p, const Maps& maps, Sums& sums, uint32_t staged, int group, int2 tile) {
    if constexpr (!Plain) prefetch_residual<T>(p, {tile.y * kTokens, tile.x * kBox}, kTokens);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const Corner at{tile.y * kTokens + half * 64, tile.x * kBox};
      store_box_of_sums<T, kBuffers, false, Plain>(p, maps.y, staged + group * kBoxBytes, group, at, [&](int v) {
        return sums.of[half][v / (kOutputs / 8)] + v % (kOutputs / 8) * 4;
      });
    }
  }

  static Status make_maps(const Product& p, const Images& images, const void*, Maps& maps) {
    BS_RETURN_IF_ERROR(make_x_map(p.x, images, kTokens, maps.x));
    return make_y_map(p.y, images, maps.y);
  }
};

}  // namespace
}  // namespace blocksparse::gemm::wgmma
