#include "ops/linear/cuda_many_walk.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/movmatrix.h"

namespace blocksparse::linear {
namespace {

constexpr int kWalkThreads = 256;
constexpr int kWarps = kWalkThreads / 32;
constexpr int kMostTileRows = 32;  // of blocks

struct ManyWalk {
  DeviceWalk walk;
  ManyTables to;
  const uint16_t* w;
  int32_t block, block_shift;
  bool by_in;
  int32_t rows;       // of blocks
  int32_t tile_rows;  // of a tile
  int32_t tiles, chunks;
  int32_t shares;  // thread blocks that copy the cells of a tile together
  int64_t inputs;
};

// Of one tile, in shared memory.
template <ManyKind Kind>
struct TileMap {
  static constexpr ManyForm form = form_of(Kind);
  static constexpr bool direct = Kind == ManyKind::direct;
  int32_t row_start[kMostTileRows + 1];
  uint32_t low[kMostChunks], high[kMostChunks];  // bits of the cells; direct: the blocks of both strips
  int32_t cells_before[kMostChunks];
  int2 of_warp[kWarps];  // cells and records

  __device__ uint64_t mask(int chunk) const { return static_cast<uint64_t>(high[chunk]) << 32 | low[chunk]; }
  __device__ int cells(int chunk) const { return direct ? 0 : __popcll(mask(chunk)); }
  __device__ int records(int chunk) const {
    if (direct) return (low[chunk] & high[chunk]) != ~0u;  // no block is ~0
    return (cells(chunk) + form.most_cells - 1) / form.most_cells;
  }
};

// Where block `from` of row `row` of the tile lies among its cells.
template <ManyKind Kind>
struct CellPlace {
  int chunk, bit, output, input;  // the last two within the cell

  __device__ CellPlace(const ManyWalk& p, int row, int from) {
    constexpr ManyForm form = form_of(Kind);
    const int out = row << p.block_shift, in = from << p.block_shift, slot = out / form.slot_outputs;
    chunk = in / kChunk;
    const int part = slot / form.part_slots(), cell = in % kChunk / form.cell_inputs;
    bit = part * form.part_bits() + cell * form.part_slots() + slot % form.part_slots();
    output = out % form.slot_outputs;
    input = in % form.cell_inputs;
  }
};

template <ManyKind Kind>
__device__ int row_of(const ManyWalk& p, const TileMap<Kind>& map, int ref) {
  int row = 0;
#pragma unroll
  for (int step = kMostTileRows / 2; step > 0; step /= 2) {
    if (row + step < p.tile_rows && ref >= map.row_start[row + step]) row += step;
  }
  return row;
}

template <ManyKind Kind>
__device__ void map_blocks(const ManyWalk& p, TileMap<Kind>& map) {
  const auto thread = static_cast<int>(threadIdx.x);
  for (int c = thread; c < p.chunks; c += kWalkThreads) map.low[c] = map.high[c] = map.direct ? ~0u : 0;
  __syncthreads();
  const int end = map.row_start[p.tile_rows];
  for (int i = map.row_start[0] + thread; i < end; i += kWalkThreads) {
    const BlockRef ref = p.walk.refs[i];
    const int row = row_of(p, map, i);
    if constexpr (Kind == ManyKind::direct) {
      const int halves = p.block / kChunk;
      for (int half = 0; half < halves; ++half) {
        const int chunk = ref.from * halves + half;
        if (halves == 2) map.low[chunk] = map.high[chunk] = static_cast<uint32_t>(ref.weight);
        else (row == 0 ? map.low : map.high)[chunk] = static_cast<uint32_t>(ref.weight);
      }
    } else {
      const CellPlace<Kind> at(p, row, ref.from);
      atomicOr((at.bit < 32 ? map.low : map.high) + at.chunk, 1u << at.bit % 32);
    }
  }
  __syncthreads();
}

// Cells and records before each chunk; returns the records before this thread's first chunk, and all cells.
template <ManyKind Kind>
__device__ int2 count_before(const ManyWalk& p, TileMap<Kind>& map, int first, int last) {
  const auto thread = static_cast<int>(threadIdx.x);
  int2 mine{0, 0};
  for (int c = first; c < last; ++c) mine.x += map.cells(c), mine.y += map.records(c);
  int2 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int cells = __shfl_up_sync(~0u, sum.x, step), records = __shfl_up_sync(~0u, sum.y, step);
    if (thread % 32 >= step) sum.x += cells, sum.y += records;
  }
  if (thread % 32 == 31) map.of_warp[thread / 32] = sum;
  __syncthreads();
  int2 before{sum.x - mine.x, sum.y - mine.y};
  int all = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const int2 of = map.of_warp[warp];
    if (warp < thread / 32) before.x += of.x, before.y += of.y;
    all += of.x;
  }
  for (int c = first, cells = before.x; c < last; ++c) {
    map.cells_before[c] = cells;
    cells += map.cells(c);
  }
  __syncthreads();
  return {before.y, all};
}

// The records of chunks first ... last - 1, from `at` on; returns where they end.
template <ManyKind Kind>
__device__ int write_records(const ManyWalk& p, const TileMap<Kind>& map, int first, int last, int at, int first_cell) {
  for (int c = first; c < last; ++c) {
    if (map.records(c) == 0) continue;
    if constexpr (Kind == ManyKind::direct) {
      const int b = p.block, half = b == 128 ? c % 2 : 0;  // of the block's inputs
      const auto low = static_cast<int>(map.low[c]), high = static_cast<int>(map.high[c]);
      if (b == 64) p.to.records[at++] = {c, low < 0 ? -1 : low * 64, high < 0 ? -1 : high * 64, 0};
      else if (p.by_in) p.to.records[at++] = {c, low * 128 + 64 * half, low * 128 + 64 * half, 64 << 16};
      else p.to.records[at++] = {c, low * 128, low * 128 + 64, 64 * half | 64 * half << 16};
    } else {
      uint64_t mask = map.mask(c);
      for (int cell = first_cell + map.cells_before[c]; mask != 0;) {
        uint64_t rest = mask;
        int count = 0;
        for (; count < map.form.most_cells && rest != 0; ++count) rest &= rest - 1;
        const uint64_t taken = mask ^ rest;
        p.to.records[at++] = {c, static_cast<int32_t>(taken), static_cast<int32_t>(taken >> 32), cell};
        cell += count, mask = rest;
      }
    }
  }
  return at;
}

// Place of a tile in the order: how many are longer. All threads.
__device__ int rank_of(const ManyWalk& p, int tile) {
  const auto length = [&](int t) {
    return p.walk.starts[min((t + 1) * p.tile_rows, p.rows)] - p.walk.starts[t * p.tile_rows];
  };
  const int mine = length(tile);
  int rank = 0;
  for (int first = 0; first < p.tiles; first += kWalkThreads) {
    const int t = first + static_cast<int>(threadIdx.x);
    const int other = t < p.tiles ? length(t) : -1;
    rank += __syncthreads_count(other > mine || (other == mine && t < tile));
  }
  return rank;
}

struct BlockCopy {
  char* cell;         // null: not this thread block's
  int output, input;  // of the block within the cell
  int weight, from;
};

__device__ inline BlockCopy from_lane(const BlockCopy& copy, int lane) {
  return {reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(copy.cell), lane)),
          __shfl_sync(~0u, copy.output, lane), __shfl_sync(~0u, copy.input, lane), __shfl_sync(~0u, copy.weight, lane),
          __shfl_sync(~0u, copy.from, lane)};
}

// The blocks of a warp's lanes. Blocks consist of matrices of 8 x 8, a core matrix each: a lane has row lane / 4,
// elements 2 (lane % 4) and the next, which movmatrix turns. 8 of them are under way at once.
template <int B, ManyKind Kind>
__device__ void copy_blocks(const ManyWalk& p, const BlockCopy& mine) {
  constexpr ManyForm form = form_of(Kind);
  constexpr int kSide = B / 8, kMatrices = kSide * kSide, kAtOnce = 8, kBlocks = (kAtOnce + kMatrices - 1) / kMatrices;
  const int row = static_cast<int>(threadIdx.x) % 32 / 4, pair = static_cast<int>(threadIdx.x) % 4 * 2;
  for (unsigned left = __ballot_sync(~0u, mine.cell != nullptr); left != 0;) {
    BlockCopy blocks[kBlocks];
#pragma unroll
    for (int q = 0; q < kBlocks; ++q) {
      blocks[q] = from_lane(mine, left == 0 ? 0 : __ffs(static_cast<int>(left)) - 1);
      if (left == 0) blocks[q].cell = nullptr;
      left &= left - 1;
    }
#pragma unroll
    for (int first = 0; first < kBlocks * kMatrices; first += kAtOnce) {
      uint32_t words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const BlockCopy& block = blocks[(first + i) / kMatrices];
        const int out = (first + i) % kMatrices % kSide * 8, in = (first + i) % kMatrices / kSide * 8;
        const int at = p.by_in ? (in + row) * B + out + pair : (out + row) * B + in + pair;
        words[i] = 0;
        if (block.cell != nullptr) {
          words[i] = *reinterpret_cast<const uint32_t*>(p.w + static_cast<int64_t>(block.weight) * (B * B) + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const BlockCopy& block = blocks[(first + i) / kMatrices];
        const int out = (first + i) % kMatrices % kSide * 8, in = (first + i) % kMatrices / kSide * 8;
        uint32_t word = p.by_in ? ptx::movmatrix_trans(words[i]) : words[i];
        const int64_t inside = p.inputs - static_cast<int64_t>(block.from) * B - in - pair;
        if (inside < 2) word = inside < 1 ? 0 : word & 0xffff;  // W may hold anything beyond the edge
        const int at = ((block.input + in) / 8 * form.slot_outputs + block.output + out + row) * 16 + pair * 2;
        if (block.cell != nullptr) *reinterpret_cast<uint32_t*>(block.cell + at) = word;
      }
    }
  }
}

// The cells of the tile that are this thread block's: those of some chunks, so that they can be filled up before.
template <ManyKind Kind>
__device__ void copy_cells(const ManyWalk& p, const TileMap<Kind>& map, int share, int all, int first_cell) {
  constexpr ManyForm form = form_of(Kind);
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto begin = static_cast<int>(int64_t{all} * share / p.shares);
  const auto end = static_cast<int>(int64_t{all} * (share + 1) / p.shares);
  const auto mine = [&](int chunk) { return map.cells_before[chunk] >= begin && map.cells_before[chunk] < end; };
  char* cells = p.to.cells + static_cast<int64_t>(first_cell) * form.cell_bytes();
  const auto cell = [&](int index) { return cells + static_cast<int64_t>(index) * form.cell_bytes(); };
  if (p.block < form.slot_outputs) {
    for (int c = warp; c < p.chunks; c += kWarps) {
      if (!mine(c)) continue;
      auto* zeros = reinterpret_cast<uint4*>(cell(map.cells_before[c]));
      for (int i = lane; i < map.cells(c) * form.cell_bytes() / 16; i += 32) zeros[i] = {0, 0, 0, 0};
    }
    __syncthreads();
  }
  const int last = map.row_start[p.tile_rows];
  for (int first = map.row_start[0] + 32 * warp; first < last; first += kWalkThreads) {
    BlockCopy copy{nullptr, 0, 0, 0, 0};
    if (const int i = first + lane; i < last) {
      const BlockRef ref = p.walk.refs[i];
      const CellPlace<Kind> at(p, row_of(p, map, i), ref.from);
      const int before = __popcll(map.mask(at.chunk) & ((uint64_t{1} << at.bit) - 1));
      if (mine(at.chunk)) copy = {cell(map.cells_before[at.chunk] + before), at.output, at.input, ref.weight, ref.from};
    }
    if (Kind == ManyKind::cells32) copy_blocks<32, Kind>(p, copy);
    else if (Kind == ManyKind::cells16 && p.block == 16) copy_blocks<16, Kind>(p, copy);
    else copy_blocks<8, Kind>(p, copy);
  }
}

template <ManyKind Kind>
__global__ void __launch_bounds__(kWalkThreads) many_walk(const __grid_constant__ ManyWalk p) {
  __shared__ TileMap<Kind> map;
  // All in front is complete before anything behind begins: see cuda_few_pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto thread = static_cast<int>(threadIdx.x), tile = static_cast<int>(blockIdx.x) / p.shares;
  const int share = static_cast<int>(blockIdx.x) % p.shares, first_row = tile * p.tile_rows;
  if (thread <= p.tile_rows) map.row_start[thread] = p.walk.starts[min(first_row + thread, p.rows)];
  __syncthreads();
  map_blocks<Kind>(p, map);
  const int each = (p.chunks + kWalkThreads - 1) / kWalkThreads;
  const int first = min(thread * each, p.chunks), last = min(first + each, p.chunks);
  const int2 counts = count_before<Kind>(p, map, first, last);
  // As many as the tile has blocks, or, where W is filled up, chunks.
  constexpr ManyForm form = form_of(Kind);
  constexpr bool kFilled = Kind == ManyKind::filled;
  const int blocks_before = map.row_start[0] * max(1, p.block / kChunk);
  const int first_record = kFilled ? tile * p.chunks : blocks_before;
  const int first_cell = kFilled ? tile * p.chunks * form.slots : blocks_before;
  if (share == 0) {
    const int begin = first_record + counts.x;
    const int end = write_records<Kind>(p, map, first, last, begin, first_cell);
    if (thread == kWalkThreads - 1) p.to.ranges[tile] = {first_record, end};
    const int rank = rank_of(p, tile);
    if (thread == 0) p.to.order[rank] = tile;
    if (tile == 0 && thread == 0) *p.to.counter = 0;
  }
  if constexpr (Kind != ManyKind::direct) copy_cells<Kind>(p, map, share, counts.y, first_cell);
}

template <class Body>
Status with_many_walk(ManyKind kind, Body body) {
  switch (kind) {
    case ManyKind::direct: return body(many_walk<ManyKind::direct>);
    case ManyKind::filled: return body(many_walk<ManyKind::filled>);
    case ManyKind::cells32: return body(many_walk<ManyKind::cells32>);
    case ManyKind::cells16: break;
  }
  return body(many_walk<ManyKind::cells16>);
}

}  // namespace

Status make_many_tables(const ManyPlan& plan, const CudaCall& call, const DeviceWalk& walk, const void* w,
                        const ManyTables& to) {
  const CudaProblem& p = call.problem;
  const auto tiles = static_cast<int32_t>(plan.tiles);
  // Thread blocks that are resident together, but 8 blocks for each of their warps, or nothing is left to do.
  const int64_t resident = int64_t{8} * call.card.multiprocessors, worthwhile = p.blocks / (8 * kWarps);
  const auto shares = static_cast<int32_t>(
      plan.kind == ManyKind::direct ? 1 : std::clamp<int64_t>(std::min(resident, worthwhile) / tiles, 1, 64));
  const ManyWalk args{.walk = walk,
                      .to = to,
                      .w = static_cast<const uint16_t*>(w),
                      .block = p.block,
                      .block_shift = __builtin_ctz(static_cast<unsigned>(p.block)),
                      .by_in = p.by_in,
                      .rows = static_cast<int32_t>(p.output_blocks()),
                      .tile_rows = std::max(1, form_of(plan.kind).outputs() / p.block),
                      .tiles = tiles,
                      .chunks = static_cast<int32_t>(plan.chunks),
                      .shares = shares,
                      .inputs = p.inputs};
  return with_many_walk(plan.kind, [&](auto kernel) {
    return cuda::launch({.blocks = int64_t{tiles} * shares,
                         .threads = kWalkThreads,
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true},
                        kernel, args);
  });
}

Status prepare_many_tables() {
  for (auto kind : {ManyKind::direct, ManyKind::filled, ManyKind::cells32, ManyKind::cells16}) {
    BS_RETURN_IF_ERROR(with_many_walk(kind, [](auto kernel) { return cuda::prepare(kernel, 0); }));
  }
  return {};
}

}  // namespace blocksparse::linear
