// What a thread block of the product with steps of one pixel does. It finds this out as it goes: the kernel takes a few
// us itself, so tables in front of it would be dear.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgmma/images.cuh"
#include "ops/conv/cuda/halo/plan.h"

namespace blocksparse::conv {
namespace {

// Jobs of 64 positions are in the order of tiles of outputs. Each thread block has a run of jobs of equal cost, which
// need not be whole tiles: whole tiles would take 4 rounds instead of 3.2 at 28 x 28. Jobs in the order of positions
// would give every thread block rows of W of all lengths, but they took 27 us instead of 23 (b = 64, density .12),
// because more tiles are cut.
struct HaloWalk {
  gemm::DeviceWalk blocks;
  int64_t outputs;
  int32_t tiles, jobs;              // of outputs, and of positions for each
  int32_t tile_jobs;                // of a tile, at most
  int32_t block_rows, block_shift;  // of W's blocks
  int32_t split_shift;              // log2 of how many times 64 a block has
  int32_t taps;
  bool by_in, has_blocks;
  int32_t block_cost;  // of a block of at most 64 x 64 and a job; a job without blocks costs kHaloJobCost

  // The cost of all tiles in front of `tile`.
  __device__ int64_t cost_before(int tile) const {
    int64_t before = 0;
    if (split_shift == 0) {
      before = blocks.starts[min(tile << (6 - block_shift), block_rows)];
    } else {  // a row of blocks is several tiles of equal cost
      const int row = tile >> split_shift, part = tile & ((1 << split_shift) - 1);
      const int64_t first = blocks.starts[min(row, block_rows)], end = blocks.starts[min(row + 1, block_rows)];
      before = (first << (2 * split_shift)) + ((end - first) << split_shift) * part;
    }
    return int64_t{kHaloJobCost} * tile + before * block_cost;
  }
};

struct HaloTile {
  int out, job, jobs;  // tile of outputs; the first of `jobs` jobs
};

// The tiles of a thread block. A whole warp calls it.
class HaloTiles {
 public:
  HaloTile tile{0, 0, 0};

  __device__ explicit HaloTiles(const HaloWalk& walk) : walk_(walk) {
    const int2 place = find();
    tile.out = __shfl_sync(~0u, place.x, 0), tile.job = __shfl_sync(~0u, place.y, 0);
    end_ = {__shfl_sync(~0u, place.x, 1), __shfl_sync(~0u, place.y, 1)};
  }

  __device__ bool next() {
    tile.job += tile.jobs;
    if (tile.job >= walk_.jobs) ++tile.out, tile.job = 0;
    if (tile.out > end_.x || (tile.out == end_.x && tile.job >= end_.y)) return false;
    const int last = tile.out == end_.x ? end_.y : walk_.jobs;
    tile.jobs = min(walk_.tile_jobs, last - tile.job);
    return true;
  }

 private:
  // Even lanes find where this thread block begins: the first job with at least this block's share of all cost in front
  // of it. Odd lanes find where the next thread block begins. No copy can start before that, so one read looks at up to
  // 16 tiles, and no 64-bit division is used: three of them took 1.2 us.
  __device__ int2 find() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t grid = gridDim.x, share = walk_.cost_before(walk_.tiles) * (int64_t{blockIdx.x} + lane % 2);
    int low = 0;  // the last tile that begins at or before it is among `count` tiles from here
    for (int count = walk_.tiles + 1, step = 0; step != 1; count = step) {
      step = ceil_div(count, 16);
      const int tile = low + lane / 2 * step;
      const bool fits = tile <= walk_.tiles && walk_.cost_before(min(tile, walk_.tiles)) * grid <= share;
      const uint32_t all = __ballot_sync(~0u, fits) & (lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau);
      low += step * ((31 - __clz(static_cast<int>(all))) / 2);
    }
    if (low == walk_.tiles) return {low, 0};
    const int64_t before = walk_.cost_before(low), each = walk_.cost_before(low + 1) - before;
    const float jobs = static_cast<float>(share - before * grid) / static_cast<float>(each * grid);
    // Rounding must not make a whole number of jobs one more: of as many thread blocks as jobs some would have two.
    constexpr float kRounded = 1 - 1e-6f;
    return {low, static_cast<int>(ceilf(jobs * static_cast<float>(walk_.jobs) * kRounded))};
  }

  const HaloWalk& walk_;
  int2 end_;
};

// A part of W that is copied and multiplied at once: 32 x 32 or 64 x 64, a block or a part of one.
struct HaloBlock {
  int chunk, in_chunk;  // the chunk of 64 channels, and the place in it, in 16 bytes
  int slot;             // of the tile's outputs
  int row, column;      // of W [blocks * taps * b, b], at the first tap
};

// The blocks of a tile of outputs, in the order of their channels. A whole warp calls it: its lanes share out the
// blocks of a row, and the next block is the first that a lane has.
template <int B>
class HaloRow {
 public:
  __device__ HaloRow(const HaloWalk& walk, int tile) : walk_(walk) {
    constexpr int kRows = kHaloOutputs / B;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    slot_ = lane / kLanes;
    part_ = tile & ((1 << walk.split_shift) - 1);
    const int row = kRows > 1 ? tile * kRows + slot_ : tile >> walk.split_shift;
    first_ = walk.blocks.starts[min(row, walk.block_rows)];
    count_ = (walk.blocks.starts[min(row + 1, walk.block_rows)] - first_) << walk.split_shift;
    at_ = lane % kLanes;
    mine_ = load(at_), ahead_ = load(at_ + kLanes);
  }

  // Goes to the next block, if there is one.
  __device__ bool next() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t found = __reduce_min_sync(~0u, mine_.x < 0 ? ~0u : static_cast<uint32_t>(mine_.x) << 5 | lane);
    found_ = found != ~0u;
    if (!found_) return false;
    const int source = static_cast<int>(found % 32);
    const int from = __shfl_sync(~0u, mine_.y, source), weight = __shfl_sync(~0u, mine_.z, source);
    const int inner = from & ((1 << walk_.split_shift) - 1);  // of the block's inputs
    block_ = {.chunk = static_cast<int>(found >> 5),
              .in_chunk = from * B % gemm::wgmma::kChunk * 2 / 16,
              .slot = source / kLanes,
              .row = weight * walk_.taps << walk_.block_shift,
              .column = 0};
    block_.row += (walk_.by_in ? inner : part_) * B * (walk_.split_shift > 0);
    block_.column = (walk_.by_in ? part_ : inner) * B * (walk_.split_shift > 0);
    if (lane == source) {
      mine_ = ahead_;
      at_ += kLanes;
      ahead_ = load(at_ + kLanes);
    }
    return true;
  }
  __device__ bool found() const { return found_; }
  __device__ const HaloBlock& block() const { return block_; }

 private:
  static constexpr int kLanes = 32 * B / kHaloOutputs;  // of a row

  // {chunk or -1, block of B inputs, weight}
  __device__ int3 load(int at) const {
    if (at >= count_) return {-1, 0, 0};
    const BlockRef ref = walk_.blocks.refs[first_ + (at >> walk_.split_shift)];
    const int from = (ref.from << walk_.split_shift) + (at & ((1 << walk_.split_shift) - 1));
    return {from * B / gemm::wgmma::kChunk, from, ref.weight};
  }

  const HaloWalk& walk_;
  int slot_, part_, first_, count_, at_;
  int3 mine_, ahead_;
  bool found_ = false;
  HaloBlock block_{};
};

}  // namespace
}  // namespace blocksparse::conv
