// The kernel of fprop and dgrad with steps of one pixel, b = 32: see cuda_halo_blocks.h.
#pragma once

#include "ops/conv/cuda_halo_product_kernel.h"

namespace blocksparse::conv {
namespace {

template <class T>
struct HaloBlocks {
  static constexpr int block = kHaloBlock, kGroups = kHaloBlockTokens / 64, kThreads = (kGroups + 1) * 128;
  static constexpr int kSlots = kHaloBlockOutputs / block;
  static constexpr int kRegisters = 104, kFeedRegisters = 64;
  struct Sums {
    float of[kSlots][block / 2];  // [64 positions, kHaloBlockOutputs] of a warpgroup
  };

  // All taps of a block, one behind the other in w: x is moved by each.
  __device__ static void multiply(float (&sums)[block / 2], const HaloProduct& h, uint32_t x, uint32_t w) {
    const uint64_t of_x = ptx::wgmma_matrix(0, 0, 1024, ptx::Swizzle::bytes_128);
    const uint64_t of_w = ptx::wgmma_matrix(0, block * 16, 128, ptx::Swizzle::none);
    uint32_t a_row = x >> 4, b = static_cast<uint32_t>(of_w) | w >> 4;
    ptx::wgmma_fence();
#pragma unroll 1
    for (int row = 0; row < h.tap_rows; ++row, a_row += static_cast<uint32_t>(h.row_step * 8)) {
      uint32_t a = a_row;
#pragma unroll 1
      for (int column = 0; column < h.tap_columns; ++column, a += static_cast<uint32_t>(h.column_step * 8)) {
#pragma unroll
        for (int k = 0; k < block / 16; ++k) {
          ptx::wgmma<T, block, false, false>(sums, of_x | (a + k * 2), (of_w >> 32 << 32) | (b + k * block * 2));
        }
        b += block * block * 2 / 16;
      }
    }
    ptx::wgmma_commit();
  }
};

// A note: slot | first 16 bytes of the block's channels << 8, flags, tile.
inline constexpr int kNoSlot = 255;

// One lane.
class HaloBlocksFeeder {
 public:
  __device__ HaloBlocksFeeder(HaloShared& shared, const HaloProduct& h, const CUtensorMap& x_map, uint32_t x)
      : shared_(shared), h_(h), x_map_(x_map), x_(x), w_(x + static_cast<uint32_t>(h.buffers * h.buffer_bytes)) {}

  __device__ void run() {
    for (int index = static_cast<int>(blockIdx.x);;) {
      const int4 tile = linear::tile_at(h_.p, index);
      if (tile.x < 0) break;
      int channels = -1;
      ManyRecord next = tile.z < tile.w ? h_.p.tables.records[tile.z] : ManyRecord{-1, kNoSlot, 0, 0};
      int i = tile.z;
      do {
        const ManyRecord record = next;
        if (i + 1 < tile.w) next = h_.p.tables.records[i + 1];
        const bool begins = record.chunk >= 0 && record.chunk != channels;
        channels = record.chunk;
        const int flag = (i + 1 >= tile.w ? linear::kEndsTile : linear::kGoesOn) | (begins ? kBegins : 0);
        send({record.a | record.b << 8, flag, tile.x, tile.y}, record, begins);
      } while (++i < tile.w);
      index = static_cast<int>(gridDim.x) + atomicAdd(h_.p.tables.counter, 1);
    }
    send({kNoSlot, linear::kExit, 0, 0}, {-1, 0, 0, 0}, false);
  }

 private:
  __device__ void send(const int4& note, const ManyRecord& record, bool begins) {
    linear::ManyShared& ring = shared_.ring;
    const uint32_t full = shared_address(&ring.full[stage_]);
    ptx::mbarrier_wait(shared_address(&ring.empty[stage_]), phase_ ^ 1);
    ptx::st_shared_16(shared_address(&ring.notes[stage_]), note);
    if (record.chunk < 0) {
      ptx::mbarrier_arrive(full);
    } else {
      const auto bytes = static_cast<uint32_t>(h_.w_bytes);
      ptx::mbarrier_arrive_expect(full, bytes + (begins ? static_cast<uint32_t>(h_.x_bytes) : 0));
      ptx::load_bulk(w_ + static_cast<uint32_t>(stage_) * bytes, h_.p.tables.cells + int64_t{record.c} * h_.w_bytes,
                     bytes, full);
      if (begins) load_x(record.chunk, note.w, full);
    }
    if (++stage_ == h_.stages) stage_ = 0, phase_ ^= 1;
  }
  __device__ void load_x(int chunk, int tile, uint32_t full) {
    if (++buffer_ == h_.buffers) buffer_ = 0, x_phase_ ^= 1;
    ptx::mbarrier_wait(shared_address(&shared_.x_empty[buffer_]), x_phase_ ^ 1);
    const linear::ImagePixel at = h_.pixels.pixel_of(tile * kHaloBlockTokens);
    ptx::load_image_box(x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes), &x_map_, full, chunk * linear::kChunk,
                        at.column, at.row, at.image, 0, 0);
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  const CUtensorMap& x_map_;
  uint32_t x_, w_;
  int stage_ = 0, buffer_ = -1;
  uint32_t phase_ = 0, x_phase_ = 0;
};

// What a warpgroup knows of both rings. A note is read while the products in front of it run.
template <class K>
class HaloBlocksConsumer {
 public:
  __device__ HaloBlocksConsumer(HaloShared& shared, const HaloProduct& h, uint32_t x, int group)
      : shared_(shared),
        h_(h),
        x_(x + static_cast<uint32_t>(group * 64 * 128)),
        w_(x + static_cast<uint32_t>(h.buffers * h.buffer_bytes)),
        arrives_(threadIdx.x % 32 == 0) {
    read_note();
  }

  __device__ bool goes_on() const { return (flag_ & linear::kExit) == 0; }

  // All records of a tile.
  __device__ int2 tile(typename K::Sums& sums) {
    while (true) {
      uint32_t old_buffer = 0;
      if ((flag_ & kBegins) != 0) {
        if (arrives_ && buffer_ >= 0) old_buffer = shared_address(&shared_.x_empty[buffer_]);
        if (++buffer_ == h_.buffers) buffer_ = 0;
      }
      const int slot = what_ & 0xff;
      const uint32_t x = x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes + (what_ >> 8) * 16);
      const uint32_t w = w_ + static_cast<uint32_t>(stage_ * h_.w_bytes);
#pragma unroll
      for (int s = 0; s < K::kSlots; ++s) {
        if (slot == s) K::multiply(sums.of[s], h_, x, w);
      }
      ptx::wgmma_wait<1>();
      release(previous_, old_buffer);
      previous_ = arrives_ ? shared_address(&shared_.ring.empty[stage_]) : 0;
      const bool ends = (flag_ & linear::kEndsTile) != 0;
      const int2 tile = tile_;
      if (ends) {
        ptx::wgmma_wait<0>();
        release(previous_, 0);
        previous_ = 0;
      }
      if (++stage_ == h_.stages) stage_ = 0, phase_ ^= 1;
      read_note();
      if (ends) return tile;
    }
  }

 private:
  __device__ static void release(uint32_t stage, uint32_t buffer) {
    __syncwarp();
    if (stage != 0) ptx::mbarrier_arrive(stage);
    if (buffer != 0) ptx::mbarrier_arrive(buffer);
  }
  // Conditions of wgmma come straight out of a shuffle: ptxas then knows that they are the same in all lanes.
  __device__ void read_note() {
    ptx::mbarrier_wait(shared_address(&shared_.ring.full[stage_]), phase_);
    const int4 note = ptx::ld_shared_16(shared_address(&shared_.ring.notes[stage_]));
    what_ = __shfl_sync(~0u, note.x, 0);
    flag_ = __shfl_sync(~0u, note.y, 0);
    tile_ = {note.z, note.w};
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  uint32_t x_, w_;
  bool arrives_;
  int stage_ = 0, what_ = 0, flag_ = 0, buffer_ = -1;
  int2 tile_{0, 0};
  uint32_t phase_ = 0, previous_ = 0;
};

template <class T, bool Plain, class K = HaloBlocks<T>>
__global__ void __launch_bounds__(K::kThreads, 1)
    halo_blocks([[maybe_unused]] const __grid_constant__ CUtensorMap x_map,
                [[maybe_unused]] const __grid_constant__ HaloProduct h) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ HaloShared shared;
  const uint32_t x = shared_address(staged) + static_cast<uint32_t>(kHaloStagedBytes);
  const int group = static_cast<int>(threadIdx.x) / 128;
  start_halo_rings(shared, h, K::kGroups * 4);
  ptx::griddepcontrol_wait();
  if (group == K::kGroups) {
    ptx::setmaxnreg_dec<K::kFeedRegisters>();
    if (threadIdx.x % 128 == 0) HaloBlocksFeeder(shared, h, x_map, x).run();
    return;
  }
  ptx::setmaxnreg_inc<K::kRegisters>();
  HaloBlocksConsumer<K> consumer(shared, h, x, group);
  while (consumer.goes_on()) {
    typename K::Sums sums{};
    const int2 tile = consumer.tile(sums);
#pragma unroll
    for (int part = 0; part < kHaloBlockOutputs / linear::kBox; ++part) {
      const linear::ManyCorner at{tile.y * kHaloBlockTokens + group * 64,
                                  tile.x * kHaloBlockOutputs + part * linear::kBox};
      store_halo_box<T, false, Plain>(h, shared_address(staged) + group * linear::kBoxBytes, group, at, [&](int v) {
        return sums.of[(part * linear::kBox + 8 * v) / K::block] + 8 * v % K::block / 2;
      });
    }
  }
#endif
}

}  // namespace
}  // namespace blocksparse::conv
