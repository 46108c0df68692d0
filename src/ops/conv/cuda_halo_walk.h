// What a thread block of the product with steps of one pixel does, found out as it goes: there are no tables to be made
// in front of the kernel, which takes some us itself.
#pragma once

#include "ops/conv/select_halo.h"
#include "ops/linear/cuda.h"
#include "ops/linear/cuda_many_images.h"

namespace blocksparse::conv {
namespace {

// Tiles are in the order of positions, so that what long and short rows of W make of them is mixed everywhere, and x is
// in L2 when the next outputs ask for it. Each thread block has a run of equal cost, which may begin and end within a
// tile: of whole tiles, 28 x 28 would make 4 rounds out of 3.2.
struct HaloWalk {
  linear::DeviceWalk blocks;
  int64_t outputs;
  int32_t tiles, units;             // of outputs, and of positions for each
  int32_t block_rows, block_shift;  // of W's blocks
  int32_t split_shift;              // log2 of the 64s along a block
  int32_t taps;
  bool by_in, has_blocks;
  int32_t block_cost;  // of a block of at most 64 x 64 and a unit; that of no block is kHaloUnitCost

  // Of all tiles in front of `tile`.
  __device__ int64_t cost_before(int tile) const {
    int64_t before = 0;
    if (split_shift == 0) {
      before = blocks.starts[min(tile << (6 - block_shift), block_rows)];
    } else {  // a row of blocks is some tiles, of equal cost
      const int row = tile >> split_shift, part = tile & ((1 << split_shift) - 1);
      const int64_t first = blocks.starts[min(row, block_rows)], end = blocks.starts[min(row + 1, block_rows)];
      before = (first << (2 * split_shift)) + ((end - first) << split_shift) * part;
    }
    return int64_t{kHaloUnitCost} * tile + before * block_cost;
  }
};

struct HaloTile {
  int out, unit, units;  // of outputs; the first of at most four units
};

// The tiles of a thread block. Called by a whole warp.
class HaloTiles {
 public:
  HaloTile tile{0, 0, 0};

  __device__ explicit HaloTiles(const HaloWalk& walk) : walk_(walk) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Place place = place_of(static_cast<int64_t>(blockIdx.x) + lane % 2);
    at_ = place.from_lane(0), end_ = place.from_lane(1);
  }

  __device__ bool next() {
    while (true) {
      if (at_.unit >= kTileUnits) ++at_.out, at_.unit = 0;
      if (at_.out >= walk_.tiles) ++at_.group, at_.out = 0;
      const bool last = at_.group == end_.group && at_.out == end_.out;
      if (at_.group > end_.group || (at_.group == end_.group && at_.out > end_.out)) return false;
      if (last && at_.unit >= end_.unit) return false;
      tile = {at_.out, at_.group * kTileUnits + at_.unit, (last ? end_.unit : kTileUnits) - at_.unit};
      tile.units = min(tile.units, walk_.units - tile.unit);
      at_.unit = last ? end_.unit : kTileUnits;
      if (tile.units > 0) return true;
    }
  }

 private:
  static constexpr int kTileUnits = kHaloPositions / kHaloUnit;

  struct Place {
    int group, out, unit;  // of positions, four units each; of outputs; in the group
    __device__ Place from_lane(int lane) const {
      return {__shfl_sync(~0u, group, lane), __shfl_sync(~0u, out, lane), __shfl_sync(~0u, unit, lane)};
    }
  };

  // Where a thread block begins: the first unit in front of which is as much as its share of all.
  __device__ Place place_of(int64_t thread_block) const {
    const int groups = (walk_.units + kTileUnits - 1) / kTileUnits;
    const int64_t of_group = walk_.cost_before(walk_.tiles) * kTileUnits;
    const int64_t share = of_group * groups * thread_block / gridDim.x, group = share / of_group;
    const int64_t rest = share - group * of_group;
    int low = 0, high = walk_.tiles - 1;  // the last tile that does not begin behind it
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (walk_.cost_before(middle) * kTileUnits <= rest) low = middle;
      else high = middle - 1;
    }
    const int64_t before = walk_.cost_before(low), each = walk_.cost_before(low + 1) - before;
    return {static_cast<int>(group), low, static_cast<int>((rest - before * kTileUnits + each - 1) / each)};
  }

  const HaloWalk& walk_;
  Place at_, end_;
};

// What is copied and multiplied together: 32 x 32, or 64 x 64, which may be a part of a block.
struct HaloBlock {
  int chunk, in_chunk;  // of 64 channels, and where in it, in 16 bytes
  int slot;             // of the tile's outputs
  int row, column;      // of W [blocks * taps * b, b], at the first tap
};

// The blocks of a tile of outputs in the order of their channels. Called by a whole warp: a row's blocks are dealt to
// its lanes, and the next one is the first that a lane has.
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

  // The next block, if there is one.
  __device__ bool next() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t found = __reduce_min_sync(~0u, mine_.x < 0 ? ~0u : static_cast<uint32_t>(mine_.x) << 5 | lane);
    found_ = found != ~0u;
    if (!found_) return false;
    const int source = static_cast<int>(found % 32);
    const int from = __shfl_sync(~0u, mine_.y, source), weight = __shfl_sync(~0u, mine_.z, source);
    const int inner = from & ((1 << walk_.split_shift) - 1);  // of the block's inputs
    block_ = {.chunk = static_cast<int>(found >> 5),
              .in_chunk = from * B % linear::kChunk * 2 / 16,
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
    return {from * B / linear::kChunk, from, ref.weight};
  }

  const HaloWalk& walk_;
  int slot_, part_, first_, count_, at_;
  int3 mine_, ahead_;
  bool found_ = false;
  HaloBlock block_{};
};

}  // namespace
}  // namespace blocksparse::conv
