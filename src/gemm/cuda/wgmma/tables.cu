#include "gemm/cuda/wgmma/tables.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/wgmma/strip_order.h"

namespace blocksparse::gemm::wgmma {
namespace {

// Threads of a thread block. A tile of small blocks has thousands of them: 256 threads took 15 us for b = 8, density
// .25, 4096 x 4096.
constexpr int walk_threads(Kind kind) { return kind == Kind::direct || kind == Kind::patches32 ? 256 : 1024; }
constexpr int kMostTileRows = 32;  // rows of blocks

struct TableWalk {
  DeviceWalk walk;
  const float* gates;
  Tables to;
  int32_t block, block_shift;
  bool by_in;
  int32_t rows;                     // rows of blocks
  int32_t tile_rows, strip_rows;    // of a tile; of one of its strips in walk.order, or of a block of 128
  int32_t tile_strips, all_strips;  // in walk.order
  int32_t tiles, chunks;

  __device__ bool counts(BlockRef ref) const { return gates == nullptr || gates[ref.weight] != 0; }
  // The strip at a place of the order. Places after the last give a strip beyond the edge.
  __device__ int strip_at(int place) const {
    return walk.order != nullptr && place < all_strips ? walk.order[place] : place;
  }
  __device__ int start_of_strip(int strip) const { return walk.starts[min(strip * strip_rows, rows)]; }
};

// What a tile has where, in shared memory.
template <Kind Kind>
struct TileMap {
  static constexpr Form form = form_of(Kind);
  static constexpr bool direct = Kind == Kind::direct;
  static constexpr int threads = walk_threads(Kind);
  int32_t row_before[kMostTileRows + 1], row_first[kMostTileRows];  // blocks before each row in the tile; where the
                                                                    // row's own begin
  uint32_t low[kMostChunks], high[kMostChunks];  // bits of the patches; direct: the blocks of both strips
  int32_t patches_before[kMostChunks];
  int2 of_warp[threads / 32];  // patches and records

  __device__ int blocks(const TableWalk& p) const { return row_before[p.tile_rows]; }
  __device__ BlockRef block(const TableWalk& p, int row, int i) const {
    return p.walk.refs[row_first[row] + i - row_before[row]];
  }
  __device__ uint64_t mask(int chunk) const { return static_cast<uint64_t>(high[chunk]) << 32 | low[chunk]; }
  __device__ int patches(int chunk) const { return direct ? 0 : __popcll(mask(chunk)); }
  __device__ int records(int chunk) const {
    if (direct) return (low[chunk] & high[chunk]) != ~0u;  // no block has the number ~0
    return ceil_div(patches(chunk), form.most_patches);
  }
};

// The place of block `from` of row `row` among the patches of the tile.
template <Kind Kind>
struct PatchPlace {
  int chunk, bit, output, input;  // output and input within the patch

  __device__ PatchPlace(const TableWalk& p, int row, int from) {
    constexpr Form form = form_of(Kind);
    const int out = row << p.block_shift, in = from << p.block_shift, band = out / form.band_outputs;
    chunk = in / kChunk;
    const int part = band / form.part_bands(), patch = in % kChunk / form.patch_inputs;
    bit = part * form.part_bits() + patch * form.part_bands() + band % form.part_bands();
    output = out % form.band_outputs;
    input = in % form.patch_inputs;
  }
};

// The row of block i of the tile.
template <Kind Kind>
__device__ int row_of(const TableWalk& p, const TileMap<Kind>& map, int i) {
  int row = 0;
#pragma unroll
  for (int step = kMostTileRows / 2; step > 0; step /= 2) {
    if (row + step < p.tile_rows && i >= map.row_before[row + step]) row += step;
  }
  return row;
}

template <Kind Kind>
__device__ void map_blocks(const TableWalk& p, TileMap<Kind>& map) {
  const auto thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < p.chunks; c += map.threads) map.low[c] = map.high[c] = map.direct ? ~0u : 0;
  __syncthreads();
  const int blocks = map.blocks(p);
  for (int i = thread; i < blocks; i += map.threads) {
    const int row = row_of(p, map, i);
    const BlockRef ref = map.block(p, row, i);
    if (!p.counts(ref)) continue;
    if constexpr (Kind == Kind::direct) {
      const int halves = p.block / kChunk;
      for (int half = 0; half < halves; ++half) {
        const int chunk = ref.from * halves + half;
        if (halves == 2) map.low[chunk] = map.high[chunk] = static_cast<uint32_t>(ref.weight);
        else (row == 0 ? map.low : map.high)[chunk] = static_cast<uint32_t>(ref.weight);
      }
    } else {
      const PatchPlace<Kind> at(p, row, ref.from);
      atomicOr((at.bit < 32 ? map.low : map.high) + at.chunk, 1u << at.bit % 32);
    }
  }
  __syncthreads();
}

// Counts patches and records before each chunk. Returns the records before this thread's first chunk, and all patches.
template <Kind Kind>
__device__ int2 count_before(const TableWalk& p, TileMap<Kind>& map, int first, int last) {
  const auto thread = static_cast<int>(threadIdx.x);
  int2 mine{0, 0};
  for (int c = first; c < last; ++c) mine.x += map.patches(c), mine.y += map.records(c);
  int2 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int patches = __shfl_up_sync(~0u, sum.x, step), records = __shfl_up_sync(~0u, sum.y, step);
    if (thread % 32 >= step) sum.x += patches, sum.y += records;
  }
  if (thread % 32 == 31) map.of_warp[thread / 32] = sum;
  __syncthreads();
  int2 before{sum.x - mine.x, sum.y - mine.y};
  int all = 0;
  for (int warp = 0; warp < map.threads / 32; ++warp) {
    const int2 of = map.of_warp[warp];
    if (warp < thread / 32) before.x += of.x, before.y += of.y;
    all += of.x;
  }
  for (int c = first, patches = before.x; c < last; ++c) {
    map.patches_before[c] = patches;
    patches += map.patches(c);
  }
  __syncthreads();
  return {before.y, all};
}

// Writes the records of chunks first ... last - 1, from `at` on. Returns where they end.
template <Kind Kind>
__device__ int write_records(const TableWalk& p, const TileMap<Kind>& map, int first, int last, int at,
                             int first_patch) {
  for (int c = first; c < last; ++c) {
    if (map.records(c) == 0) continue;
    if constexpr (Kind == Kind::direct) {
      const int b = p.block, half = b == 128 ? c % 2 : 0;  // which half of the block's inputs
      const auto low = static_cast<int>(map.low[c]), high = static_cast<int>(map.high[c]);
      if (b == 64) p.to.records[at++] = {c, low < 0 ? -1 : low * 64, high < 0 ? -1 : high * 64, 0};
      else if (p.by_in) p.to.records[at++] = {c, low * 128 + 64 * half, low * 128 + 64 * half, 64 << 16};
      else p.to.records[at++] = {c, low * 128, low * 128 + 64, 64 * half | 64 * half << 16};
    } else {
      uint64_t mask = map.mask(c);
      for (int patch = first_patch + map.patches_before[c]; mask != 0;) {
        uint64_t rest = mask;
        int count = 0;
        for (; count < map.form.most_patches && rest != 0; ++count) rest &= rest - 1;
        const uint64_t taken = mask ^ rest;
        p.to.records[at++] = {c, static_cast<int32_t>(taken), static_cast<int32_t>(taken >> 32), patch};
        patch += count, mask = rest;
      }
    }
  }
  return at;
}

// The blocks of this tile and of the tile with the thread's number. They are loaded long before rank_of() needs them.
struct TileLengths {
  int mine, other;

  __device__ static int of(const TableWalk& p, int tile) {
    int blocks = 0;
    for (int i = 0; i < p.tile_strips; ++i) {
      const int strip = p.strip_at(tile * p.tile_strips + i);
      blocks += p.start_of_strip(strip + 1) - p.start_of_strip(strip);
    }
    return blocks;
  }
  __device__ TileLengths(const TableWalk& p, int tile) : mine(of(p, tile)), other(of_thread(p, 0)) {}
  __device__ static int of_thread(const TableWalk& p, int first) {
    const int tile = first + static_cast<int>(threadIdx.x);
    return tile < p.tiles ? of(p, tile) : -1;
  }
};

// The blocks of the tiles before this one. Called by all threads; writes map.of_warp.
template <Kind Kind>
__device__ int blocks_in_front(const TableWalk& p, TileMap<Kind>& map, const TileLengths& lengths, int tile) {
  const auto thread = static_cast<int>(threadIdx.x);
  int sum = thread < tile ? lengths.other : 0;
  for (int t = thread + map.threads; t < tile; t += map.threads) sum += TileLengths::of(p, t);
  sum = __reduce_add_sync(~0u, sum);
  if (thread % 32 == 0) map.of_warp[thread / 32].x = sum;
  __syncthreads();
  int all = 0;
  for (int warp = 0; warp < map.threads / 32; ++warp) all += map.of_warp[warp].x;
  return all;
}

// Finds the tile's rows, by the first warp.
template <Kind Kind>
__device__ void map_rows(const TableWalk& p, TileMap<Kind>& map, int tile) {
  const auto row = static_cast<int>(threadIdx.x);
  const int strip = row < p.tile_rows ? p.strip_at(tile * p.tile_strips + row / p.strip_rows) : 0;
  const int of_matrix = min(strip * p.strip_rows + row % p.strip_rows, p.rows);
  const int first = p.walk.starts[of_matrix], end = p.walk.starts[min(of_matrix + 1, p.rows)];
  int before = row < p.tile_rows ? end - first : 0;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (row >= step) before += other;
  }
  map.row_first[row] = first;
  map.row_before[row + 1] = before;
  if (row == 0) map.row_before[0] = 0;
}

// The place of a tile in the order: the number of longer tiles. Called by all threads.
template <int Threads>
__device__ int rank_of(const TableWalk& p, const TileLengths& lengths, int tile) {
  int rank = 0;
  for (int first = 0; first < p.tiles; first += Threads) {
    const int t = first + static_cast<int>(threadIdx.x);
    const int other = first == 0 ? lengths.other : TileLengths::of_thread(p, first);
    rank += __syncthreads_count(other > lengths.mine || (other == lengths.mine && t < tile));
  }
  return rank;
}

// Writes which block each part of the tile's patches is a copy of. There is room for `room` patches.
template <Kind Kind>
__device__ void write_sources(const TableWalk& p, const TileMap<Kind>& map, int patches, int room, int first_patch) {
  constexpr Form form = form_of(Kind);
  const auto thread = static_cast<int>(threadIdx.x);
  const int columns = form.patch_inputs >> p.block_shift, ids = (form.band_outputs >> p.block_shift) * columns;
  Source* sources = p.to.sources + int64_t{first_patch} * ids;
  if (ids > 1 || p.gates != nullptr) {
    for (int i = thread; i < room * ids; i += map.threads) sources[i] = {i < patches * ids ? kZeros : kNoPatch, 0};
    __syncthreads();
  }
  const int blocks = map.blocks(p);
  for (int i = thread; i < blocks; i += map.threads) {
    const int row = row_of(p, map, i);
    const BlockRef ref = map.block(p, row, i);
    if (!p.counts(ref)) continue;
    const PatchPlace<Kind> at(p, row, ref.from);
    const int patch = map.patches_before[at.chunk] + __popcll(map.mask(at.chunk) & ((uint64_t{1} << at.bit) - 1));
    sources[patch * ids + (at.output >> p.block_shift) * columns + (at.input >> p.block_shift)] = {ref.weight,
                                                                                                   ref.from};
  }
}

template <Kind Kind>
__global__ void __launch_bounds__(walk_threads(Kind)) wgmma_tables(const __grid_constant__ TableWalk p) {
  __shared__ TileMap<Kind> map;
  // All earlier kernels are complete before any later one begins: see stream_w/pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto thread = static_cast<int>(threadIdx.x), tile = static_cast<int>(blockIdx.x);
  if (thread < 32) map_rows<Kind>(p, map, tile);
  const TileLengths lengths(p, tile);
  const int in_front = blocks_in_front<Kind>(p, map, lengths, tile);
  map_blocks<Kind>(p, map);
  const int each = ceil_div(p.chunks, map.threads);
  const int first = min(thread * each, p.chunks), last = min(first + each, p.chunks);
  const int2 counts = count_before<Kind>(p, map, first, last);
  // Room for as many as the tile has blocks or, if W is filled up, chunks.
  constexpr Form form = form_of(Kind);
  constexpr bool kFilled = Kind == Kind::filled;
  const int blocks_before = in_front * max(1, p.block / kChunk);
  const int first_record = kFilled ? tile * p.chunks : blocks_before;
  const int first_patch = kFilled ? tile * p.chunks * form.bands : blocks_before;
  const int end = write_records<Kind>(p, map, first, last, first_record + counts.x, first_patch);
  const int rank = rank_of<walk_threads(Kind)>(p, lengths, tile);
  if (thread == map.threads - 1) p.to.tiles[rank].first = first_record, p.to.tiles[rank].last = end;
  if (thread < 4) {
    const int place = tile * form.bands * form.band_outputs / kStrip + thread;
    p.to.tiles[rank].strips[thread] = p.block > kStrip ? place : p.strip_at(place);
  }
  if (tile == 0 && thread == 0) *p.to.counter = 0;
  if constexpr (Kind != Kind::direct) {
    const int room = kFilled ? p.chunks * form.bands : map.blocks(p);
    write_sources<Kind>(p, map, counts.y, room, first_patch);
  }
}

template <class Body>
Status with_walk(Kind kind, Body body) {
  switch (kind) {
    case Kind::direct: return body(wgmma_tables<Kind::direct>);
    case Kind::filled: return body(wgmma_tables<Kind::filled>);
    case Kind::patches32: return body(wgmma_tables<Kind::patches32>);
    case Kind::patches16: break;
  }
  return body(wgmma_tables<Kind::patches16>);
}

}  // namespace

Status make_tables(const Plan& plan, const CudaCall& call, const DeviceWalk& walk, const float* gates,
                   const Tables& to) {
  const CudaProblem& p = call.problem;
  const auto tiles = static_cast<int32_t>(plan.tiles);
  const int32_t tile_rows = std::max(1, form_of(plan.kind).outputs() / p.block);
  const int32_t strip_rows = std::max(1, kStrip / p.block);
  TableWalk args{.walk = walk,
                 .gates = gates,
                 .to = to,
                 .block = p.block,
                 .block_shift = __builtin_ctz(static_cast<unsigned>(p.block)),
                 .by_in = p.by_in,
                 .rows = static_cast<int32_t>(p.output_blocks()),
                 .tile_rows = tile_rows,
                 .strip_rows = strip_rows,
                 .tile_strips = tile_rows / strip_rows,
                 .all_strips = static_cast<int32_t>(ceil_div(p.outputs, kStrip)),
                 .tiles = tiles,
                 .chunks = static_cast<int32_t>(plan.chunks)};
  if (p.block > kStrip) args.walk.order = nullptr;  // a block is a tile
  return with_walk(plan.kind, [&](auto kernel) {
    return cuda::launch({.blocks = tiles,
                         .threads = walk_threads(plan.kind),
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true},
                        kernel, args);
  });
}

Status prepare_tables() {
  for (auto kind : {Kind::direct, Kind::filled, Kind::patches32, Kind::patches16}) {
    BS_RETURN_IF_ERROR(with_walk(kind, [](auto kernel) { return cuda::prepare(kernel, 0); }));
  }
  return {};
}

}  // namespace blocksparse::gemm::wgmma
