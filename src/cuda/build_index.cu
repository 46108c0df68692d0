// The tables of a layout from a mask on a card: what core/build_index.cc makes on the host, bit for bit except the
// hash.
//   mask [out_blocks, in_blocks], bytes   index: see core/index.h
// Who does what
//   pack_mask     a warp for 32 x 32 entries: bits of rows, and of columns
//   count_rows    a warp for each row and column: its blocks, and how many lie before each word
//   cut_rows      a thread block for each direction: where rows begin, what is cut, header, pieces in the order of rows
//   write_tables  a thread for each word: its refs; a warp for each piece: its place
// If the mask does not hold as many blocks as the layout has, the tables have no blocks and the header says so.
#include "cuda/build_index.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/device_index.h"
#include "cuda/card.h"
#include "cuda/launch.h"

namespace blocksparse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCutThreads = 1024;

struct Build {
  DeviceIndexPlan plan;
  const uint8_t* mask;
  int32_t *index, *scratch;

  __device__ const DeviceIndexSide& side(int i) const { return i == 0 ? plan.by_out : plan.by_in; }
  __device__ Header& header() const { return *reinterpret_cast<Header*>(index); }
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int64_t warp() { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32; }

// The bits of 32 x 32 entries, by row and by column. Nothing is written beyond the edges.
__global__ void __launch_bounds__(kThreads) pack_mask(const __grid_constant__ Build b) {
  const int64_t words = b.plan.by_out.words, tile = warp();
  const int64_t first_row = tile / words * 32, first_column = tile % words * 32;
  const int64_t rows = b.plan.by_out.rows, columns = b.plan.by_in.rows;
  if (first_row >= rows) return;
  uint32_t bits = 0;
  // Lanes read neighbouring entries of a row, byte by byte: the mask needs no alignment.
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    const int64_t row = first_row + r, column = first_column + lane();
    const bool there = row < rows && column < columns && b.mask[row * columns + column] != 0;
    const uint32_t of_row = __ballot_sync(~0u, there);
    if (lane() == r) bits = of_row;
  }
  uint32_t turned = 0;
#pragma unroll
  for (int c = 0; c < 32; ++c) {
    const uint32_t of_column = __ballot_sync(~0u, (bits >> c & 1) != 0);
    if (lane() == c) turned = of_column;
  }
  if (first_row + lane() < rows) {
    b.scratch[b.plan.by_out.bits + (first_row + lane()) * words + first_column / 32] = static_cast<int32_t>(bits);
  }
  if (first_column + lane() < columns) {
    b.scratch[b.plan.by_in.bits + (first_column + lane()) * b.plan.by_in.words + first_row / 32] =
        static_cast<int32_t>(turned);
  }
}

// The i-th row of both directions; those of by_out come first.
struct SideRow {
  int side, row;
  __device__ SideRow(const Build& b, int64_t i) {
    side = i < b.plan.by_out.rows ? 0 : 1;
    row = static_cast<int>(i - (side == 0 ? 0 : b.plan.by_out.rows));
  }
};

__global__ void __launch_bounds__(kThreads) count_rows(const __grid_constant__ Build b) {
  const SideRow at(b, warp());
  const DeviceIndexSide& s = b.side(at.side);
  if (at.row >= s.rows) return;
  int total = 0;
  for (int first = 0; first < s.words; first += 32) {
    const int word = first + lane();
    const int64_t where = int64_t{at.row} * s.words + word;
    const int mine = word < s.words ? __popc(static_cast<uint32_t>(b.scratch[s.bits + where])) : 0;
    int sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane() >= step) sum += other;
    }
    if (word < s.words) b.scratch[s.before + where] = total + sum - mine;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane() == 0) b.scratch[s.counts + at.row] = total;
}

// The numbers of blocks, pieces, slots and splits of some rows.
struct Tally {
  int blocks, pieces, slots, splits;
};
__device__ inline Tally operator+(const Tally& a, const Tally& b) {
  return {a.blocks + b.blocks, a.pieces + b.pieces, a.slots + b.slots, a.splits + b.splits};
}

// Returns the sum over the threads before this one; `all` is the sum over all threads.
__device__ Tally sum_before(const Tally& mine, Tally& all) {
  __shared__ Tally of_warp[kCutThreads / 32];
  Tally sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const Tally other = {__shfl_up_sync(~0u, sum.blocks, step), __shfl_up_sync(~0u, sum.pieces, step),
                         __shfl_up_sync(~0u, sum.slots, step), __shfl_up_sync(~0u, sum.splits, step)};
    if (lane() >= step) sum = sum + other;
  }
  __syncthreads();  // what of_warp held has been read
  if (lane() == 31) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  Tally before = {sum.blocks - mine.blocks, sum.pieces - mine.pieces, sum.slots - mine.slots, sum.splits - mine.splits};
  all = {};
  for (int w = 0; w < kCutThreads / 32; ++w) {
    if (w < static_cast<int>(threadIdx.x) / 32) before = before + of_warp[w];
    all = all + of_warp[w];
  }
  return before;
}

__device__ int64_t all_blocks(const Build& b, const DeviceIndexSide& s) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int row = static_cast<int>(threadIdx.x); row < s.rows; row += kCutThreads) {
    mine += static_cast<unsigned>(b.scratch[s.counts + row]);
  }
  atomicAdd(&total, mine);  // whole numbers: the order does not matter
  __syncthreads();
  return static_cast<int64_t>(total);
}

// Writes a row of `count` blocks: its pieces, its split, its start.
__device__ void write_row(const Build& b, const DeviceIndexSide& s, int row, int count, int parts, const Tally& at) {
  auto* unsorted = reinterpret_cast<Piece*>(b.scratch + s.unsorted);
  b.index[s.starts + row] = at.blocks;
  if (parts > 1) reinterpret_cast<Split*>(b.index + s.splits)[at.splits] = {row, at.slots, parts, 0};
  for (int i = 0; i < parts; ++i) {
    const auto cut = [&](int k) { return at.blocks + static_cast<int>(int64_t{count} * k / parts); };
    unsorted[at.pieces + i] = {row, cut(i), cut(i + 1), parts > 1 ? at.slots + i : -1};
    b.scratch[s.keys + at.pieces + i] = piece_key(count, parts);
  }
}

__global__ void __launch_bounds__(kCutThreads) cut_rows(const __grid_constant__ Build b) {
  const auto which = static_cast<int>(blockIdx.x);
  const DeviceIndexSide& s = b.side(which);
  const int64_t total = all_blocks(b, s);
  const bool right = total == b.plan.header.blocks;
  Tally before = {};
  for (int first = 0; first < s.rows; first += kCutThreads) {
    const int row = first + static_cast<int>(threadIdx.x);
    const int count = row < s.rows && right ? b.scratch[s.counts + row] : 0;
    const int parts = row >= s.rows ? 0 : slices_of(count, s.cap, s.most_slices);
    Tally all;
    const Tally of_chunk = sum_before({count, parts, parts > 1 ? parts : 0, parts > 1 ? 1 : 0}, all);
    if (row < s.rows) write_row(b, s, row, count, parts, before + of_chunk);
    before = before + all;
  }
  if (threadIdx.x != 0) return;
  b.index[s.starts + s.rows] = before.blocks;
  Header& h = b.header();
  if (which == 1) {
    h.by_in = {before.pieces, before.splits, before.slots};
    return;
  }
  Header mine = b.plan.header;
  mine.reserved[kWrongBlocks] = right ? 0 : 1;
  mine.reserved[kFoundBlocks] = right ? 0 : static_cast<int32_t>(min(total, int64_t{0x7fffffff}));
  // All words except by_in, which the other thread block writes.
  constexpr int kByIn = offsetof(Header, by_in) / 4, kAfter = kByIn + 3;
  mine.by_out = {before.pieces, before.splits, before.slots};
  const auto* words = reinterpret_cast<const int32_t*>(&mine);
  for (int i = 0; i < 32; ++i) {
    if (i < kByIn || i >= kAfter) b.index[i] = words[i];
  }
}

// Writes the refs of one word of a row or a column.
__device__ void write_refs(const Build& b, int side, int64_t word) {
  const DeviceIndexSide &s = b.side(side), &out = b.plan.by_out;
  auto* refs = reinterpret_cast<BlockRef*>(b.index + s.refs);
  const int row = static_cast<int>(word / s.words), first = static_cast<int>(word % s.words) * 32;
  auto bits = static_cast<uint32_t>(__ldg(b.scratch + s.bits + word));
  int place = __ldg(b.index + s.starts + row) + __ldg(b.scratch + s.before + word);
  for (; bits != 0; bits &= bits - 1, ++place) {
    const int other = first + __ffs(static_cast<int>(bits)) - 1;
    if (side == 0) {
      refs[place] = {other, place};
      b.index[b.plan.out_of + place] = row;
      continue;
    }
    const int64_t there = int64_t{other} * out.words + row / 32;
    const uint32_t left = static_cast<uint32_t>(__ldg(b.scratch + out.bits + there)) & ((1u << row % 32) - 1);
    refs[place] = {other, __ldg(b.index + out.starts + other) + __ldg(b.scratch + out.before + there) + __popc(left)};
  }
}

// Brings piece `i`, counted in the order of rows, to its place: by key, and by the order of rows for equal keys.
__device__ void write_piece(const Build& b, const DeviceIndexSide& s, int i, int pieces) {
  const int32_t* keys = b.scratch + s.keys;
  const int mine = keys[i];
  int rank = 0;
  for (int other = lane(); other < pieces; other += 32) {
    const int key = keys[other];
    rank += key > mine || (key == mine && other < i);
  }
  rank = __reduce_add_sync(~0u, rank);
  if (lane() == 0) {
    reinterpret_cast<Piece*>(b.index + s.pieces)[rank] = reinterpret_cast<const Piece*>(b.scratch + s.unsorted)[i];
  }
}

// Sets words that belong to no entry to 0.
__device__ void clear(const Build& b, int64_t first, int64_t last) {
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) b.index[i] = 0;
}

__device__ void clear_rest(const Build& b) {
  const int64_t blocks = b.plan.header.blocks;
  const Header& h = b.header();
  for (int i = 0; i < 2; ++i) {
    const DeviceIndexSide& s = b.side(i);
    clear(b, s.starts + s.rows + 1, s.refs);
    clear(b, s.refs + (h.reserved[kWrongBlocks] != 0 ? 0 : 2 * blocks), s.pieces);
    clear(b, s.pieces + 4 * (i == 0 ? h.by_out.pieces : h.by_in.pieces), s.splits);
    clear(b, s.splits + 4 * (i == 0 ? h.by_out.splits : h.by_in.splits), s.order);
    for (auto row = static_cast<int32_t>(threadIdx.x); row < s.rows; row += kThreads) b.index[s.order + row] = row;
    clear(b, s.order + s.rows, s.end);
  }
  clear(b, b.plan.out_of + (h.reserved[kWrongBlocks] != 0 ? 0 : blocks), b.plan.words);
}

__host__ __device__ inline int64_t word_blocks(int64_t words) { return ceil_div(words, kThreads); }

__global__ void __launch_bounds__(kThreads) write_tables(const __grid_constant__ Build b) {
  const Header& h = b.header();
  if (blockIdx.x + 1 == gridDim.x) {
    clear_rest(b);
    return;
  }
  const int64_t out_words = int64_t{b.plan.by_out.rows} * b.plan.by_out.words,
                in_words = int64_t{b.plan.by_in.rows} * b.plan.by_in.words;
  const int64_t word = int64_t{blockIdx.x} * kThreads + threadIdx.x, of_words = word_blocks(out_words + in_words);
  if (blockIdx.x < of_words) {
    if (h.reserved[kWrongBlocks] != 0 || word >= out_words + in_words) return;
    if (word < out_words) write_refs(b, 0, word);
    else write_refs(b, 1, word - out_words);
    return;
  }
  int64_t i = warp() - of_words * kWarps;
  if (i < h.by_out.pieces) {
    write_piece(b, b.plan.by_out, static_cast<int>(i), h.by_out.pieces);
  } else if ((i -= h.by_out.pieces) < h.by_in.pieces) {
    write_piece(b, b.plan.by_in, static_cast<int>(i), h.by_in.pieces);
  }
}

Status build_index(const DeviceIndexPlan& plan, const uint8_t* mask, int32_t* index, int32_t* workspace, void* stream) {
  const Build b{plan, mask, index, workspace};
  const auto launch_warps = [&](int64_t warps, auto kernel, int more = 0) -> Status {
    if (warps == 0 && more == 0) return {};
    return launch(
        {.blocks = ceil_div(warps, kWarps) + more, .threads = kThreads, .stream = static_cast<cudaStream_t>(stream)},
        kernel, b);
  };
  const int64_t rows = int64_t{plan.by_out.rows} + plan.by_in.rows;
  BS_RETURN_IF_ERROR(launch_warps(ceil_div(int64_t{plan.by_out.rows}, 32) * plan.by_out.words, pack_mask));
  BS_RETURN_IF_ERROR(launch_warps(rows, count_rows));
  BS_RETURN_IF_ERROR(
      launch({.blocks = 2, .threads = kCutThreads, .stream = static_cast<cudaStream_t>(stream)}, cut_rows, b));
  const int64_t words = int64_t{plan.by_out.rows} * plan.by_out.words + int64_t{plan.by_in.rows} * plan.by_in.words;
  return launch_warps(rows + 2 * kMaxSlots, write_tables, static_cast<int>(word_blocks(words)) + 1);
}

}  // namespace

Status prepare_build_index() {
  BS_RETURN_IF_ERROR(prepare(pack_mask, 0));
  BS_RETURN_IF_ERROR(prepare(count_rows, 0));
  BS_RETURN_IF_ERROR(prepare(cut_rows, 0));
  return prepare(write_tables, 0);
}

}  // namespace blocksparse::cuda

namespace blocksparse {

Status make_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes, std::span<int32_t> index, Device device,
                         Workspace workspace, Stream stream) {
  const auto plan = check_device_index(mask, sizes, index, device, workspace);
  if (!plan.ok()) return plan.status();
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return cuda::build_index(*plan, mask, index.data(), static_cast<int32_t*>(workspace.data), stream.handle);
}

}  // namespace blocksparse
