// The arguments of the kernel for all steps, and how its thread blocks divide the units.
#pragma once

#include "core/tables.h"
#include "ops/lstm/cuda/w_in_smem/kernel.h"

namespace blocksparse::lstm {
namespace {

struct WInSmemArgs {
  const int32_t* starts;
  const BlockRef* refs;
  const void *pre, *w, *h0, *c0;
  void *y, *gates, *cells, *h_end, *c_end;
  const int64_t* lengths;
  uint32_t* arrivals;  // [strips][groups], 0 at first
  int32_t steps, n, hidden, strips, groups;
  int32_t block, shift;  // a block is 1 << shift units of work wide
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

// The list of a gate's rows in a strip: where it begins in the layout's list, and its length in units of 32 inputs.
struct List {
  int first, count;
};

struct Lists {
  const BlockRef* refs;
  int block, shift;  // a block is 1 << shift units wide
  int row;           // of the strip's first output within its block
  List of[kGates];

  __device__ Lists(const WInSmemArgs& p, int strip) : refs(p.refs), block(p.block), shift(p.shift) {
    row = (strip & ((1 << shift) - 1)) * kStripUnits;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const int32_t* start = p.starts + gate * (p.hidden / block) + (strip >> shift);
      of[gate] = {start[0], (start[1] - start[0]) << shift};
    }
  }
  __device__ int chunk(int gate, int unit) const {
    return (refs[of[gate].first + (unit >> shift)].from << shift) + (unit & ((1 << shift) - 1));
  }
  // Where this lane's 8 inputs of its row of part `part` begin, in elements.
  __device__ int64_t weight(int gate, int unit, int part) const {
    const int64_t row_of_lane = int64_t{of[gate].first + (unit >> shift)} * block + row + 8 * part + lane() / 4;
    return row_of_lane * block + (unit & ((1 << shift) - 1)) * kStripUnits + lane() % 4 * 8;
  }
  // Whether all gates have one list of chunks.
  __device__ bool agree() const {
    bool same = true;
    for (int gate = 1; gate < kGates; ++gate) same = same && of[gate].count == of[0].count;
    for (int i = lane(); same && i < of[0].count; i += 32) {
      for (int gate = 1; gate < kGates; ++gate) same = same && chunk(gate, i) == chunk(0, i);
    }
    return __all_sync(~0u, same);
  }
};

// Finds the strips of this thread block; -1 stands for none. `counts` has room for all strips.
__device__ inline void deal_strips(const WInSmemArgs& p, int32_t* counts, int32_t* owned) {
  for (int s = static_cast<int>(threadIdx.x); s < p.strips; s += static_cast<int>(blockDim.x)) {
    const Lists lists(p, s);
    counts[s] = lists.of[0].count + lists.of[1].count + lists.of[2].count + lists.of[3].count;
  }
  if (threadIdx.x < kMostStrips) owned[threadIdx.x] = -1;
  __syncthreads();
  const int grid = static_cast<int>(gridDim.x);
  for (int s = static_cast<int>(threadIdx.x); s < p.strips; s += static_cast<int>(blockDim.x)) {
    int rank = 0;
    for (int other = 0; other < p.strips; ++other) {
      rank += counts[other] > counts[s] || (counts[other] == counts[s] && other < s) ? 1 : 0;
    }
    const int round = rank / grid, place = rank % grid;
    if ((round % 2 == 0 ? place : grid - 1 - place) == static_cast<int>(blockIdx.x)) owned[round] = s;
  }
  __syncthreads();
}

}  // namespace
}  // namespace blocksparse::lstm
