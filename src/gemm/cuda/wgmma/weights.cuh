// b = 64, 128 (and smaller ones filled up): W is wgmma's left operand, 256 tokens its columns, so that a product reads
// shared memory half as often as with 64 columns.
//   load      a box of x [256 tokens, 64 inputs], or 4 of them features-first; of W a box [64, 64] for each strip of
//             outputs that has a block, or one copy of the patches
//   compute   a warpgroup for each strip of 64 outputs; y^T in registers
#pragma once

#include "gemm/cuda/wgmma/finish.cuh"
#include "gemm/cuda/wgmma/maps.cuh"

namespace blocksparse::gemm::wgmma {
namespace {

template <XOrder Order>
struct WeightsMaps {
  XMap<Order> x;
  YMap<Order> y;
  CUtensorMap w;
};

template <class T, Kind Kind, bool ByIn, XOrder Order>
struct WeightRows {
  using Maps = WeightsMaps<Order>;
  static constexpr Form form = form_of(Kind);
  static constexpr bool direct = Kind == Kind::direct, x_first = Order == XOrder::features;
  static constexpr int kTokens = form.tokens, kGroups = form.parts, kThreads = (kGroups + 1) * 128;
  static constexpr bool kTurned = true;    // rows of the sums are outputs
  static constexpr bool kFills = !direct;  // zeros stand for missing blocks
  static constexpr int kBuffers = 2, kStagedBytes = kGroups * kBuffers * kBoxBytes;
  static constexpr int kXBytes = kTokens * kChunk * 2, kWBytes = form.bands * form.patch_bytes();
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kStages = (226 * 1024 - kStagedBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStagedBytes + kStages * kStageBytes;
  static constexpr int kRegisters = 224, kFeedRegisters = 56;
  static_assert(kStages <= kMostStages && form.part_bits() == 1);

  __device__ static Record no_record() { return {-1, direct ? -1 : 0, direct ? -1 : 0, 0}; }

  __device__ static uint32_t load(const Args& p, const Maps& maps, const Record& r, int token_tile, uint32_t stage,
                                  uint32_t full) {
    load_x<Order, kTokens>(stage, maps.x, full, r.chunk * kChunk, token_tile * kTokens);
    load_weights(p, maps, r, stage + kXBytes, full);
    return kXBytes + weight_bytes(r);
  }
  __device__ static uint32_t weight_bytes(const Record& r) {
    const int patches = direct ? (r.a >= 0) + (r.b >= 0) : __popc(r.a);
    return static_cast<uint32_t>(patches * form.patch_bytes());
  }
  __device__ static void load_weights(const Args& p, const Maps& maps, const Record& r, uint32_t w, uint32_t full) {
    if constexpr (direct) {
      if (r.a >= 0) ptx::load_box(w, &maps.w, full, r.c & 0xffff, r.a);
      if (r.b >= 0) ptx::load_box(w + form.patch_bytes(), &maps.w, full, r.c >> 16, r.b);
    } else {
      ptx::load_bulk(w, p.tables.patches + int64_t{r.c} * form.patch_bytes(), weight_bytes(r), full);
    }
  }
  // {bits of the strips, patches before those of the second strip, -, -}
  __device__ static int4 note(const Record& r) {
    if constexpr (direct) return {(r.a >= 0 ? 1 : 0) | (r.b >= 0 ? 2 : 0), 1, 0, 0};
    return {r.a, r.a & 1, 0, 0};
  }
  __device__ static uint32_t mask_of(const int4& note, int group) { return static_cast<uint32_t>(note.x >> group & 1); }
  __device__ static uint32_t before_of(const int4& note, int group) {
    return group == 0 ? 0 : static_cast<uint32_t>(note.y);
  }

  struct Sums {
    float of[kTokens / 2];
  };

  __device__ static void multiply(Sums& sums, uint32_t stage, uint32_t mask, uint32_t before) {
    multiply(sums, stage, stage + kXBytes, mask, before);
  }
  __device__ static void multiply(Sums& sums, uint32_t x_at, uint32_t w_at, uint32_t, uint32_t before) {
    const uint32_t w = w_at + before * form.patch_bytes();
    const uint64_t b = ptx::wgmma_matrix(x_at, x_first ? 64 * kChunk * 2 : 0, 1024, ptx::Swizzle::bytes_128);
    const uint64_t a = direct ? ptx::wgmma_matrix(w, 0, 1024, ptx::Swizzle::bytes_128)
                              : ptx::wgmma_matrix(w, 1024, 128, ptx::Swizzle::none);
    constexpr bool kTransposed = direct && ByIn;  // a box [inputs, outputs]
    constexpr int kStep = direct && !ByIn ? 2 : 128, kStepX = x_first ? 128 : 2;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      ptx::wgmma<T, kTokens, kTransposed, x_first>(sums.of, a + k * kStep, b + k * kStepX);
    }
    ptx::wgmma_commit();
  }

  // Calls store(box in shared memory, its corner, sums of 8 columns) for each box of y.
  template <class Store>
  __device__ static void for_each_box(Sums& sums, uint32_t staged, int group, int2 tile, Store store) {
#pragma unroll
    for (int part = 0; part < kTokens / kBox; ++part) {
      const Corner at{tile.y * kTokens + part * kBox, tile.x * kBox};
      store(staged + (group * kBuffers + part % kBuffers) * kBoxBytes, at,
            [&, part](int v) { return sums.of + (part * 8 + v) * 4; });
    }
  }
  template <bool Plain>
  __device__ static void finish(const Args& p, const Maps& maps, Sums& sums, uint32_t staged, int group, int2 tile) {
    if constexpr (!Plain) prefetch_residual<T>(p, {tile.y * kTokens, tile.x * kBox}, kTokens);
    for_each_box(sums, staged, group, tile, [&](uint32_t box, Corner at, auto sums_of) {
      store_box_of_sums<T, kBuffers, true, Plain>(p, maps.y, box, group, at, sums_of);
    });
  }

  // `w`: the address of W, or of its copy.
  static Status make_w_map(const Product& p, const void* w, Maps& maps) {
    const int32_t b = p.layout.block_size;
    if (!direct || p.layout.blocks == 0) return {};  // an empty map is refused, and not needed
    return cuda::make_tensor_map(
        {.data = w, .columns = b, .rows = p.layout.blocks * b, .row_stride = b, .box_columns = kChunk, .box_rows = 64},
        maps.w);
  }
  static Status make_maps(const Product& p, const Images& images, const void* w, Maps& maps) {
    BS_RETURN_IF_ERROR(make_w_map(p, w, maps));
    BS_RETURN_IF_ERROR(make_x_map(p.x, images, kTokens, maps.x));
    return make_y_map(p.y, images, maps.y);
  }
};

}  // namespace
}  // namespace blocksparse::gemm::wgmma
