// The kernel of fprop and dgrad with steps of one pixel: see product.cuh.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ring.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/wgmma/finish.cuh"
#include "ops/conv/cuda/halo/walk.cuh"

namespace blocksparse::conv {
namespace {

using ptx::shared_address;

struct HaloProduct {
  HaloWalk walk;
  gemm::Finish finish;             // tokens are pixels of y
  gemm::wgmma::ImageSteps pixels;  // of x, in the order of the raster
  int32_t taps, tap_columns, row_step, column_step, reach;
  bool mirrored;                          // the last tap of W meets the first pixel
  int32_t columns, rows, images;          // of y
  int32_t x_bytes, buffer_bytes, stages;  // of a box of x, and of both rings
};

struct HaloMaps {
  CUtensorMap x, w;
};

// B = 64 serves larger blocks too. `Taps` are those of a block in one stage. `Groups` is how many warpgroups multiply.
template <class T, int B, int Taps, int Groups, bool ByIn>
struct HaloKernel {
  using Element = T;
  static constexpr int block = B, taps = Taps, kGroups = Groups, kHalves = 2, kSlots = kHaloOutputs / B;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 32, kTapBytes = B * B * 2;
  static constexpr int kResident = 4 / Groups;  // thread blocks of an SM
  struct Sums {
    float of[kHalves][kSlots][B / 2];  // [64 positions, kHaloOutputs], twice
  };
  static_assert(kHalves == kHaloHalves && (Taps <= 3 || Taps == 9));
  static constexpr ptx::Swizzle kSwizzle = B == 64   ? ptx::Swizzle::bytes_128
                                           : B == 32 ? ptx::Swizzle::bytes_64
                                                     : ptx::Swizzle::bytes_32;

  // Multiplies the taps of a stage, for the first `Halves` of a warpgroup's positions. w and shifts count 16 bytes.
  template <int Halves>
  __device__ static void multiply(Sums& sums, int slot, uint32_t x, uint32_t w, const uint32_t (&shifts)[Taps]) {
    const uint64_t of_x = ptx::wgmma_matrix(0, 0, 1024, ptx::Swizzle::bytes_128);
    const uint64_t of_w = ptx::wgmma_matrix(0, 0, B * 16, kSwizzle);
    constexpr uint32_t kHalf = kGroups * kHaloJob * 128 / 16, kStep = ByIn ? 2 * B : 2;
    ptx::wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < Taps; ++tap) {
#pragma unroll
      for (int k = 0; k < B / 16; ++k) {
        const uint64_t b = of_w | (w + tap * (kTapBytes / 16) + k * kStep);
#pragma unroll
        for (int half = 0; half < Halves; ++half) {
          const uint64_t a = of_x | (x + shifts[tap] + half * kHalf + k * 2);
          ptx::wgmma<T, B, false, ByIn>(sums.of[half][slot], a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }
};

struct HaloShared {
  cuda::Ring<kMostHaloProductStages> ring;
  uint64_t x_empty[kHaloBuffers];
  int4 notes[kMostHaloProductStages];  // {what, shifts of two taps, shift of the third, -}; with 9 taps the first shift
  int4 tiles[kMostHaloProductStages];  // the tile of each stage, read at its last one
};

// A note's `what` is slot | flags << 8 | jobs of the tile << 16.
enum HaloFlag : int32_t { kEndsTile = 1, kBegins = 2, kExit = 4 };
inline constexpr int kNoSlot = 255;

// All threads call it.
template <class K>
__device__ void start_halo_rings(HaloShared& shared, int stages) {
  if (threadIdx.x == 0) {
    shared.ring.init(stages, K::kGroups * 4);
    for (uint64_t& barrier : shared.x_empty) ptx::mbarrier_init(shared_address(&barrier), K::kGroups * 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// The producer warp: all lanes walk the lists of blocks, and one copies.
template <class K>
class HaloFeeder {
 public:
  __device__ HaloFeeder(HaloShared& shared, const HaloProduct& h, const HaloMaps& maps, uint32_t x)
      : shared_(shared),
        h_(h),
        maps_(maps),
        x_(x),
        w_(x + static_cast<uint32_t>(kHaloBuffers * h.buffer_bytes)),
        leads_(threadIdx.x % 32 == 0) {}

  __device__ void run() {
    for (HaloTiles tiles(h_.walk); tiles.next();) {
      HaloRow<K::block> row(h_.walk, tiles.tile.out);
      channels_ = -1;
      if (!row.next() && leads_) send_empty(kNoSlot | kEndsTile << 8 | tiles.tile.jobs << 16, tiles.tile);
      while (row.found()) {
        const HaloBlock block = row.block();
        const bool ends = !row.next(), begins = block.chunk != channels_;
        channels_ = block.chunk;
        if (leads_) send_block(block, tiles.tile, begins, ends);
        __syncwarp();
      }
    }
    if (leads_) send_empty(kNoSlot | kExit << 8, {});
  }

 private:
  __device__ void send_empty(int what, const HaloTile& tile) {
    shared_.ring.wait_empty(place_);
    note(what, 0, 0, tile);
    shared_.ring.expect_nothing(place_);
    place_.advance(h_.stages);
  }
  __device__ void note(int what, int shifts, int third, const HaloTile& tile) {
    ptx::st_shared_16(shared_address(&shared_.notes[place_.stage]), {what, shifts, third, 0});
    ptx::st_shared_16(shared_address(&shared_.tiles[place_.stage]), {tile.out, tile.job, tile.jobs, 0});
  }
  __device__ void send_block(const HaloBlock& block, const HaloTile& tile, bool begins, bool ends) {
    int row = 0, column = 0;
    const auto next_shift = [&] {
      const int shift = row + column * h_.column_step;
      if (++column == h_.tap_columns) column = 0, row += h_.row_step;
      return (h_.mirrored ? h_.reach - shift : shift) * 8 + block.in_chunk;
    };
    for (int tap = 0; tap < h_.taps; tap += K::taps) {
      const bool brings_x = begins && tap == 0;
      const int flags = (brings_x ? kBegins : 0) | (ends && tap + K::taps == h_.taps ? kEndsTile : 0);
      int shifts[K::taps < 3 ? 3 : K::taps] = {};
#pragma unroll
      for (int i = 0; i < K::taps; ++i) shifts[i] = next_shift();
      shared_.ring.wait_empty(place_);
      const int first = K::taps > 3 ? shifts[0] : shifts[0] | shifts[1] << 16;
      note(block.slot | flags << 8 | tile.jobs << 16, first, shifts[2], tile);
      constexpr int kBytes = K::taps * K::kTapBytes;
      shared_.ring.expect(place_, static_cast<uint32_t>(kBytes + (brings_x ? h_.x_bytes : 0)));
      ptx::load_box(place_.in(w_, kBytes), &maps_.w, shared_.ring.full(place_), block.column,
                    block.row + (tap << h_.walk.block_shift));
      if (brings_x) load_x(block.chunk, tile.job);
      place_.advance(h_.stages);
    }
  }
  __device__ void load_x(int chunk, int job) {
    if (++buffer_ == kHaloBuffers) buffer_ = 0, x_phase_ ^= 1;
    ptx::mbarrier_wait(shared_address(&shared_.x_empty[buffer_]), x_phase_ ^ 1);
    const gemm::wgmma::ImagePixel at = h_.pixels.pixel_of(job * kHaloJob);
    ptx::load_image_box(x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes), &maps_.x, shared_.ring.full(place_),
                        chunk * gemm::wgmma::kChunk, at.column, at.row, at.image, 0, 0);
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  const HaloMaps& maps_;
  uint32_t x_, w_;
  cuda::RingPlace place_;
  bool leads_;
  int buffer_ = -1, channels_ = -1;
  uint32_t x_phase_ = 0;
};

// A warpgroup's view of both rings. It reads a note while the products in front of the note run.
template <class K>
class HaloConsumer {
 public:
  __device__ HaloConsumer(HaloShared& shared, const HaloProduct& h, uint32_t x, int group)
      : shared_(shared),
        h_(h),
        x_(x + static_cast<uint32_t>(group * kHaloJob * 128)),
        w_(x + static_cast<uint32_t>(kHaloBuffers * h.buffer_bytes)),
        group_(group),
        arrives_(threadIdx.x % 32 == 0) {
    read_note();
  }

  __device__ bool goes_on() const { return (flags_ & kExit) == 0; }

  // Multiplies all stages of a tile.
  __device__ HaloTile tile(typename K::Sums& sums) {
    while (true) {
      uint32_t old_buffer = 0;
      if ((flags_ & kBegins) != 0) old_buffer = next_buffer();
      multiply(sums);
      ptx::wgmma_wait<1>();
      release(previous_, old_buffer);
      previous_ = arrives_ ? shared_.ring.empty(place_) : 0;
      const bool ends = (flags_ & kEndsTile) != 0;
      int4 tile{};
      if (ends) {
        tile = ptx::ld_shared_16(shared_address(&shared_.tiles[place_.stage]));
        ptx::wgmma_wait<0>();
        release(previous_, holds_);
        previous_ = holds_ = 0;
      }
      place_.advance(h_.stages);
      read_note();
      if (ends) return {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0)};
    }
  }

 private:
  // Goes to the next buffer of x. Returns the barrier of the old one, which is free when the products under way have
  // ended.
  __device__ uint32_t next_buffer() {
    const uint32_t old = holds_;
    if (++buffer_ == kHaloBuffers) buffer_ = 0;
    holds_ = arrives_ ? shared_address(&shared_.x_empty[buffer_]) : 0;
    return old;
  }
  // The warpgroups take jobs of positions in turn.
  __device__ void multiply(typename K::Sums& sums) {
    const uint32_t x = (x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes)) >> 4;
    const uint32_t w = place_.in(w_, K::taps * K::kTapBytes) >> 4;
    uint32_t shifts[K::taps];
    shifts_of_taps(shifts);
#pragma unroll
    for (int s = 0; s < K::kSlots; ++s) {
      if (product_ == 2 * s + 2) K::template multiply<2>(sums, s, x, w, shifts);
      if (product_ == 2 * s + 1) K::template multiply<1>(sums, s, x, w, shifts);
    }
  }
  __device__ void shifts_of_taps(uint32_t (&shifts)[K::taps]) const {
    const uint32_t noted[3] = {static_cast<uint32_t>(shifts_ & 0xffff), static_cast<uint32_t>(shifts_) >> 16,
                               static_cast<uint32_t>(third_)};
    const int step = h_.mirrored ? -8 : 8;
#pragma unroll
    for (int tap = 0; tap < K::taps; ++tap) {
      const int further = step * (tap / 3 * h_.row_step + tap % 3 * h_.column_step);
      shifts[tap] = K::taps > 3 ? noted[0] + static_cast<uint32_t>(further) : noted[tap % 3];
    }
  }
  __device__ static void release(uint32_t stage, uint32_t buffer) {
    __syncwarp();
    if (stage != 0) ptx::mbarrier_arrive(stage);
    if (buffer != 0) ptx::mbarrier_arrive(buffer);
  }
  // Conditions of wgmma and its operands come straight out of a shuffle, because ptxas then knows that they are equal
  // in all lanes.
  __device__ void read_note() {
    shared_.ring.wait_full(place_);
    const int4 note = ptx::ld_shared_16(shared_address(&shared_.notes[place_.stage]));
    const int slot = note.x & 0xff, halves = ceil_div((note.x >> 16) - group_, K::kGroups);
    product_ = __shfl_sync(~0u, slot == kNoSlot || halves == 0 ? 0 : 2 * slot + halves, 0);
    flags_ = __shfl_sync(~0u, note.x >> 8 & 0xff, 0);
    shifts_ = __shfl_sync(~0u, note.y, 0);
    third_ = __shfl_sync(~0u, note.z, 0);
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  uint32_t x_, w_;
  cuda::RingPlace place_;
  int group_;
  bool arrives_;
  int buffer_ = -1;
  int product_ = 0, flags_ = 0, shifts_ = 0, third_ = 0;  // of the note; 2 slot + halves, or 0
  uint32_t previous_ = 0, holds_ = 0;  // barriers of a stage and a buffer, where this lane answers for them
};

// ---- Finish ---------------------------------------------------------------------------------------------------------

// Bias and activation in straight code. sums(v) are columns 8 v to 8 v + 7, counted from `output`.
template <class T, class Sums>
__device__ inline void finish_sums(const HaloProduct& h, int64_t output, Sums sums) {
  const auto* bias = static_cast<const T*>(h.finish.bias);
  if (bias != nullptr) {
#pragma unroll
    for (int v = 0; v < kHaloOutputs / 8; ++v) {
      const int64_t column = output + 8 * v + threadIdx.x % 4 * 2;
      const bool inside = column < h.walk.outputs;  // outputs are a multiple of 8
      const float low = inside ? widen(bias[column]) : 0, high = inside ? widen(bias[column + 1]) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums(v)[i] += i % 2 == 0 ? low : high;
    }
  }
  switch (h.finish.activation) {
    case Activation::none: break;
    case Activation::relu: gemm::wgmma::activate<Activation::relu>(sums); break;
    case Activation::gelu: gemm::wgmma::activate<Activation::gelu>(sums); break;
    case Activation::silu: gemm::wgmma::activate<Activation::silu>(sums); break;
    case Activation::gelu_tanh: gemm::wgmma::activate<Activation::gelu_tanh>(sums); break;
  }
}

// Stores 64 positions of the raster to the pixels of y, if they are pixels, 16 bytes a lane. A way through shared
// memory would leave no room for a second thread block.
template <class T, class Sums>
__device__ inline void store_job(const HaloProduct& h, int job, int64_t output, Sums sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) % 128 / 32;
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    gemm::wgmma::ImagePixel pixel = h.pixels.pixel_of(job * kHaloJob + warp * 16 + lane / 4 + 8 * low);
    pixel.column -= h.pixels.first[0], pixel.row -= h.pixels.first[1];
    const bool inside = pixel.image < h.images && pixel.row < h.rows && pixel.column < h.columns;
    const int64_t place = (int64_t{pixel.image} * h.rows + pixel.row) * h.columns + pixel.column;
#pragma unroll
    for (int v = 0; v < kHaloOutputs / 8; v += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = narrow_pair(sums(v + i)[2 * low], sums(v + i)[2 * low + 1], T{});
      cuda::turn_quad(word);
      const int64_t at = output + 8 * (v + lane % 4);
      if (!inside || at >= h.walk.outputs) continue;
      *reinterpret_cast<uint4*>(h.finish.y.at<T>(place, at)) = {word[0], word[1], word[2], word[3]};
    }
  }
}

// Plain: sums are stored as they are. One kernel for both would take registers from the loop.
template <class K, bool Plain>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    halo_product([[maybe_unused]] const __grid_constant__ HaloMaps maps,
                 [[maybe_unused]] const __grid_constant__ HaloProduct h) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char buffers[];
  __shared__ HaloShared shared;
  using T = typename K::Element;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&maps.x);
    if (h.walk.has_blocks) ptx::prefetch_map(&maps.w);
  }
  start_halo_rings<K>(shared, h.stages);
  // The kernel in front is complete before the kernel behind begins; that one must wait before it reads y.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (group == K::kGroups) {
    HaloFeeder<K>(shared, h, maps, shared_address(buffers)).run();
    return;
  }
  HaloConsumer<K> consumer(shared, h, shared_address(buffers), group);
  while (consumer.goes_on()) {
    typename K::Sums sums{};
    const HaloTile tile = consumer.tile(sums);
    ptx::wgmma_wait<0>();  // a second wait: without it ptxas waits for each product where sums are used (C7518)
#pragma unroll
    for (int half = 0; half < K::kHalves; ++half) {
      const int job = half * K::kGroups + group;
      if (__shfl_sync(~0u, job >= tile.jobs, 0)) continue;
      const int64_t output = int64_t{tile.out} * kHaloOutputs;
      const auto of = [&](int v) { return sums.of[half][8 * v / K::block] + 8 * v % K::block / 2; };
      if constexpr (!Plain) finish_sums<T>(h, output, of);
      store_job<T>(h, tile.job + job, output, of);
    }
  }
#endif
}

}  // namespace
}  // namespace blocksparse::conv
