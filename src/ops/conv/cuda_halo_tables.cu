#include "ops/conv/cuda_halo_tables.h"

#include <algorithm>

#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::conv {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = kHaloBlock, kTileRows = kHaloBlockOutputs / kBlock, kInChunk = linear::kChunk / kBlock;

struct HaloTables {
  linear::DeviceWalk walk;
  linear::ManyTables to;
  const int4* w;
  int32_t rows, tiles;  // of blocks
  int32_t blocks;
  cuda::Divider taps;
  bool by_in, mirrored;
};

// The first of refs[first ... last - 1], which are in order, that reads input block `from` or a later one.
__device__ int first_from(const BlockRef* refs, int first, int last, int from) {
  while (first < last) {
    const int middle = (first + last) / 2;
    if (refs[middle].from < from) first = middle + 1;
    else last = middle;
  }
  return first;
}

// A thread block a tile: each block's place is the number of those in front of it.
__device__ void write_records(const HaloTables& t, int tile) {
  __shared__ int32_t starts[kTileRows + 1];
  const int thread = static_cast<int>(threadIdx.x), first_row = tile * kTileRows;
  if (thread <= kTileRows) starts[thread] = t.walk.starts[min(first_row + thread, t.rows)];
  __syncthreads();
  const int first = starts[0], last = starts[kTileRows];
  for (int i = first + thread; i < last; i += kThreads) {
    const BlockRef ref = t.walk.refs[i];
    const int chunk = ref.from / kInChunk;
    int rank = 0, row = 0;
    for (int r = 0; r < kTileRows; ++r) {
      const bool mine = i >= starts[r] && i < starts[r + 1], before = i >= starts[r + 1];
      if (mine) row = r;
      rank += mine ? i - starts[r]
                   : first_from(t.walk.refs, starts[r], starts[r + 1], (chunk + before) * kInChunk) - starts[r];
    }
    t.to.records[first + rank] = {chunk, row, ref.from % kInChunk * (kBlock / 8), i};
  }
  if (thread == 0) t.to.ranges[tile] = {first, last};
}

// Place of a tile in the order: how many are longer.
__device__ void write_order(const HaloTables& t, int tile) {
  const auto length = [&](int i) {
    return t.walk.starts[min((i + 1) * kTileRows, t.rows)] - t.walk.starts[i * kTileRows];
  };
  const int mine = length(tile);
  int rank = 0;
  for (int first = 0; first < t.tiles; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x), other = i < t.tiles ? length(i) : -1;
    rank += __syncthreads_count(other > mine || (other == mine && i < tile));
  }
  if (threadIdx.x == 0) t.to.order[rank] = tile;
  if (tile == 0 && threadIdx.x == 0) *t.to.counter = 0;
}

// A thread 16 bytes: 8 inputs of an output of a block at a tap.
__device__ void copy_weights(const HaloTables& t) {
  constexpr int b = kBlock, vectors = b * b / 8;
  const int64_t count = int64_t{t.blocks} * static_cast<int>(t.taps.by) * vectors;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int vector = static_cast<int>(i % vectors), output = vector % b, eight = vector / b;
    int place = static_cast<int>(i / vectors);
    const int block = t.taps.divide(place), taps = static_cast<int>(t.taps.by);
    const int tap = t.mirrored ? taps - 1 - place : place;
    const int64_t from = (int64_t{t.walk.refs[block].weight} * taps + tap) * vectors;
    int4 words;
    if (t.by_in) {  // a column
      const auto* column = reinterpret_cast<const uint16_t*>(t.w + from) + eight * 8 * b + output;
      uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) pairs[k] = column[2 * k * b] | static_cast<uint32_t>(column[(2 * k + 1) * b]) << 16;
      words = {static_cast<int>(pairs[0]), static_cast<int>(pairs[1]), static_cast<int>(pairs[2]),
               static_cast<int>(pairs[3])};
    } else {
      words = t.w[from + output * (b / 8) + eight];
    }
    reinterpret_cast<int4*>(t.to.cells)[i] = words;
  }
}

__global__ void __launch_bounds__(kThreads) halo_tables_and_weights(const __grid_constant__ HaloTables t) {
  // All in front is complete before anything behind begins: see linear/cuda_few_pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  for (int tile = static_cast<int>(blockIdx.x); tile < t.tiles; tile += static_cast<int>(gridDim.x)) {
    write_records(t, tile);
    write_order(t, tile);
    __syncthreads();
  }
  copy_weights(t);
}

}  // namespace

Status make_halo_tables(const Product& p, const HaloBlocksPlan& plan, const linear::ManyTables& to,
                        cudaStream_t stream) {
  const HaloTables t{.walk = linear::walk_on_device(p.layout, p.by_in),
                     .to = to,
                     .w = static_cast<const int4*>(p.w),
                     .rows = static_cast<int32_t>(plan.output_blocks),
                     .tiles = static_cast<int32_t>(plan.tiles),
                     .blocks = static_cast<int32_t>(p.layout.blocks),
                     .taps = cuda::Divider(p.gather.taps()),
                     .by_in = p.by_in,
                     .mirrored = plan.phase.taps.mirrored};
  const int64_t vectors = p.layout.blocks * plan.block_bytes / 16;
  const int64_t blocks =
      std::clamp<int64_t>((vectors + kThreads - 1) / kThreads, std::min<int64_t>(plan.tiles, 2048), 2048);
  return cuda::launch({.blocks = blocks, .threads = kThreads, .stream = stream, .overlap = true},
                      halo_tables_and_weights, t);
}

Status prepare_halo_tables() { return cuda::prepare(halo_tables_and_weights, 0); }

}  // namespace blocksparse::conv
