// The kernel of fprop and dgrad with steps of one pixel: see cuda_halo_product.h.
#pragma once

#include "cuda/divider.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/conv/select_halo.h"
#include "ops/linear/cuda_many_weights.h"

namespace blocksparse::conv {
namespace {

using linear::ManyRecord;
using ptx::shared_address;

struct HaloProduct {
  linear::ManyProduct p;      // tokens are positions of the raster
  linear::ImageSteps pixels;  // of x
  cuda::Divider taps, taps_of_row;
  int32_t row_step, column_step;  // positions between taps
  int32_t tap_rows, tap_columns;
  int32_t w_bytes;                                 // of a block with all taps
  int32_t columns, rows, images;                   // of y
  int32_t x_bytes, buffer_bytes, buffers, stages;  // of x in shared memory, and of the ring
};

struct HaloShared {
  linear::ManyShared ring;
  uint64_t x_empty[kMostHaloBuffers];
};

// Feeders have more to keep than those of the linear op.
inline constexpr int kRegisters = 216, kFeedRegisters = 72;

// All threads. `consumers` arrive when they have used a stage or x.
__device__ inline void start_halo_rings(HaloShared& shared, const HaloProduct& h, int consumers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < h.buffers; ++i) ptx::mbarrier_init(shared_address(&shared.x_empty[i]), consumers);
  }
  linear::start_ring(shared.ring, h.stages, consumers);
}

// Bits of a note's flag from the third on: the record is the first of its channels; its tap's shift.
inline constexpr int kBegins = 4, kShiftBits = 3;

// ---- Load: as linear::ManyFeeder, but that x comes with the first record of a chunk of channels ---------------------

template <class K>
class HaloFeeder {
 public:
  __device__ HaloFeeder(HaloShared& shared, const HaloProduct& h, const typename K::Maps& maps, uint32_t x, int id)
      : shared_(shared),
        h_(h),
        maps_(maps),
        x_(x),
        w_(x + static_cast<uint32_t>(h.buffers * h.buffer_bytes)),
        id_(id) {}

  __device__ void run() {
    int4 tile = next_tile();
    ManyRecord batch = fetch(tile.z, tile.w);
    while (tile.x >= 0) {
      int4 following{-1, 0, 0, 0};
      ManyRecord ahead = K::no_record();
      int i = tile.z;
      channels_ = -1;
      do {
        const ManyRecord now = batch;
        if (i + 32 < tile.w) batch = fetch(i + 32, tile.w);
        const int count = max(1, min(32, tile.w - i));  // an empty tile has one record without data
        for (int j = 0; j < count; ++j) {
          if (i + j == max(tile.w - kAhead, tile.z)) {
            following = next_tile();
            ahead = fetch(following.z, following.w);
          }
          const ManyRecord record{__shfl_sync(~0u, now.chunk, j), __shfl_sync(~0u, now.a, j),
                                  __shfl_sync(~0u, now.b, j), __shfl_sync(~0u, now.c, j)};
          send(record, {tile.x, tile.y}, i + j + 1 >= tile.w ? linear::kEndsTile : linear::kGoesOn);
        }
        i += 32;
      } while (i < tile.w);
      tile = following, batch = ahead;
    }
    send(K::no_record(), {0, 0}, linear::kExit);
  }

 private:
  static constexpr int kAhead = 4;  // records before the end of a tile at which the next one is asked for

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ ManyRecord fetch(int first, int last) const {
    return first + lane() < last ? h_.p.tables.records[first + lane()] : K::no_record();
  }
  __device__ int4 next_tile() {
    linear::ManyShared& ring = shared_.ring;
    ptx::mbarrier_wait(shared_address(&ring.handed), tile_phase_);
    tile_phase_ ^= 1;
    __syncwarp();
    int4 tile{0, 0, 0, 0};
    if (lane() == 0) {
      tile = ptx::ld_shared_16(shared_address(&ring.tile));
      ptx::mbarrier_arrive(shared_address(&ring.taken));
    }
    return {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0),
            __shfl_sync(~0u, tile.w, 0)};
  }
  // A record goes out when the one behind it is known; the very first has no data.
  __device__ void send(const ManyRecord& record, int2 tile, linear::ManyFlag flag) {
    int tap = max(record.chunk, 0);
    const int channels = h_.taps.divide(tap), row = h_.taps_of_row.divide(tap);
    const bool begins = record.chunk >= 0 && channels != channels_;
    channels_ = channels;
    if (turn_ == id_ && lane() == 0) {
      linear::ManyShared& ring = shared_.ring;
      int4 note = K::note(record);
      note.w = flag | (begins ? kBegins : 0) | (row * h_.row_step + tap * h_.column_step) << kShiftBits;
      ptx::mbarrier_wait(shared_address(&ring.full[stage_]), phase_ ^ 1);
      ptx::mbarrier_wait(shared_address(&ring.empty[stage_]), phase_ ^ 1);
      ptx::st_shared_16(shared_address(&ring.notes[stage_]), note);
      ring.tiles[stage_] = held_tile_;
      load_held(shared_address(&ring.full[stage_]));
    }
    __syncwarp();
    if (++turn_ == linear::kFeeders) turn_ = 0;
    if (begins && ++buffer_ == h_.buffers) buffer_ = 0, x_phase_ ^= 1;
    held_ = record, held_tile_ = tile, held_begins_ = begins, held_channels_ = channels;
    if (++stage_ == h_.stages) stage_ = 0, phase_ ^= 1;
  }
  __device__ void load_held(uint32_t full) {
    if (held_.chunk < 0) {
      ptx::mbarrier_arrive(full);
      return;
    }
    ptx::mbarrier_arrive_expect(full, K::weight_bytes(held_) + (held_begins_ ? static_cast<uint32_t>(h_.x_bytes) : 0));
    K::load_weights(h_.p, maps_, held_, w_ + stage_ * K::kWBytes, full);
    if (!held_begins_) return;
    ptx::mbarrier_wait(shared_address(&shared_.x_empty[buffer_]), x_phase_ ^ 1);
    const linear::ImagePixel at = h_.pixels.pixel_of(held_tile_.y * K::kTokens);
    ptx::load_image_box(x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes), &maps_.x.map, full,
                        held_channels_ * linear::kChunk, at.column, at.row, at.image, 0, 0);
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  const typename K::Maps& maps_;
  uint32_t x_, w_;
  int id_;
  int stage_ = 0, turn_ = 0, channels_ = -1;
  int buffer_ = -1;  // of the held record's channels
  uint32_t tile_phase_ = 0, phase_ = 0, x_phase_ = 0;
  ManyRecord held_{-1, 0, 0, 0};
  int2 held_tile_{0, 0};
  bool held_begins_ = false;
  int held_channels_ = 0;
};

// ---- Compute: as linear::ManyConsumer -------------------------------------------------------------------------------

template <class K>
class HaloConsumer {
 public:
  __device__ HaloConsumer(HaloShared& shared, const HaloProduct& h, uint32_t x, int group)
      : shared_(shared),
        h_(h),
        x_(x),
        w_(x + static_cast<uint32_t>(h.buffers * h.buffer_bytes)),
        group_(group),
        arrives_(threadIdx.x % 32 == 0) {}

  // Past the record without data.
  __device__ void begin() {
    wait();
    __syncwarp();
    if (arrives_) ptx::mbarrier_arrive(empty());
    advance();
  }
  __device__ bool goes_on() const { return (flag_ & linear::kExit) == 0; }

  // All records of a tile.
  __device__ int2 tile(typename K::Sums& sums) {
    while (true) {
      if ((flag_ & kBegins) != 0) next_buffer();
      wait();
      const bool ends = (flag_ & linear::kEndsTile) != 0;
      int2 tile{0, 0};
      if (ends) tile = shared_.ring.tiles[stage_];
      if (mask_ != 0) {
        idle_ = 0;
        const uint32_t x = x_ + static_cast<uint32_t>(buffer_ * h_.buffer_bytes + (flag_ >> kShiftBits) * 128);
        K::multiply(sums, x, w_ + static_cast<uint32_t>(stage_) * K::kWBytes, mask_, before_);
        ptx::wgmma_wait<1>();
        release_previous();
        previous_ = arrives_ ? empty() : 0;
      } else {  // each warp for itself; what an earlier record still reads must not be held for long
        if (++idle_ == 2) finish_previous();
        __syncwarp();
        if (arrives_) ptx::mbarrier_arrive(empty());
      }
      advance();
      if (!ends) continue;
      finish_previous();
      idle_ = 0;
      return tile;
    }
  }

 private:
  __device__ uint32_t empty() const { return shared_address(&shared_.ring.empty[stage_]); }
  __device__ void wait() {
    ptx::mbarrier_wait(shared_address(&shared_.ring.full[stage_]), phase_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.ring.notes[stage_]));
  }
  // x of other channels, or of another tile: all that reads the last one has ended.
  __device__ void next_buffer() {
    finish_previous();
    if (arrives_ && buffer_ >= 0) ptx::mbarrier_arrive(shared_address(&shared_.x_empty[buffer_]));
    if (++buffer_ == h_.buffers) buffer_ = 0;
  }
  __device__ void release_previous() {
    __syncwarp();
    if (previous_ != 0) ptx::mbarrier_arrive(previous_);
    previous_ = 0;
  }
  __device__ void finish_previous() {
    ptx::wgmma_wait<0>();
    release_previous();
  }
  __device__ void advance() {
    if (++stage_ == h_.stages) stage_ = 0, phase_ ^= 1;
    mask_ = __shfl_sync(~0u, K::mask_of(note_, group_), 0);
    before_ = __shfl_sync(~0u, K::before_of(note_, group_), 0);
    flag_ = __shfl_sync(~0u, note_.w, 0);
  }

  HaloShared& shared_;
  const HaloProduct& h_;
  uint32_t x_, w_;
  int group_;
  bool arrives_;
  int stage_ = 0, idle_ = 0, flag_ = linear::kGoesOn, buffer_ = -1;
  uint32_t phase_ = 0, previous_ = 0, mask_ = 0, before_ = 0;
  int4 note_{0, 0, 0, 0};
};

// ---- Finish ---------------------------------------------------------------------------------------------------------

// Rows of a box to the pixels of y that they are, where there is one. (Copies of images into y are refused where the
// filter's positions go beyond it.)
template <class T>
__device__ inline void scatter_box(const HaloProduct& h, uint32_t box, linear::ManyCorner at) {
  const int thread = static_cast<int>(threadIdx.x) % 128, vector = thread % 8;
  const int64_t output = at.output + 8 * vector;
#pragma unroll
  for (int row = thread / 8; row < linear::kBox; row += 16) {
    linear::ImagePixel pixel = h.pixels.pixel_of(at.token + row);
    pixel.column -= h.pixels.first[0], pixel.row -= h.pixels.first[1];
    if (pixel.image >= h.images || pixel.row >= h.rows || pixel.column >= h.columns || output >= h.p.outputs) continue;
    const int64_t place = (int64_t{pixel.image} * h.rows + pixel.row) * h.columns + pixel.column;
    *reinterpret_cast<int4*>(h.p.finish.at<T>(place, output)) = ptx::ld_shared_16(linear::in_box(box, row, vector));
  }
}

template <class T, bool Turned, bool Plain, class Sums>
__device__ inline void store_halo_box(const HaloProduct& h, uint32_t box, int group, linear::ManyCorner at, Sums sums) {
  if constexpr (!Plain) {
    if (h.p.finish.bias != nullptr) linear::add_bias<T, Turned>(h.p, at, sums);
    switch (h.p.finish.activation) {
      case Activation::none: break;
      case Activation::relu: linear::activate<Activation::relu>(sums); break;
      case Activation::gelu: linear::activate<Activation::gelu>(sums); break;
      case Activation::silu: linear::activate<Activation::silu>(sums); break;
    }
  }
  linear::stage_box<T, Turned>(box, sums);
  ptx::bar_sync(1 + group, 128);
  scatter_box<T>(h, box, at);
  ptx::bar_sync(1 + group, 128);
}

template <class T, class K, bool Plain>
__global__ void __launch_bounds__(K::kThreads, 1)
    halo_product([[maybe_unused]] const __grid_constant__ typename K::Maps maps,
                 [[maybe_unused]] const __grid_constant__ HaloProduct h) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ HaloShared shared;
  const uint32_t x = shared_address(staged) + K::kStagedBytes;
  const int group = static_cast<int>(threadIdx.x) / 128;
  start_halo_rings(shared, h, K::kGroups * 4);
  ptx::griddepcontrol_wait();
  if (group == K::kGroups) {
    ptx::setmaxnreg_dec<kFeedRegisters>();
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    if (warp < linear::kFeeders) HaloFeeder<K>(shared, h, maps, x, warp).run();
    else if (threadIdx.x % 32 == 0) linear::hand_out_tiles(shared.ring, h.p);
    return;
  }
  ptx::setmaxnreg_inc<kRegisters>();
  HaloConsumer<K> consumer(shared, h, x, group);
  consumer.begin();
  while (consumer.goes_on()) {
    typename K::Sums sums{};
    const int2 tile = consumer.tile(sums);
    K::for_each_box(sums, shared_address(staged), group, tile, [&](uint32_t box, linear::ManyCorner at, auto sums_of) {
      store_halo_box<T, K::kTurned, Plain>(h, box, group, at, sums_of);
    });
  }
#endif
}

}  // namespace
}  // namespace blocksparse::conv
