// The kernels of wgrad for many tokens: see cuda_many_gradient.h.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "ops/linear/cuda_gradient_target.h"
#include "ops/linear/cuda_many_maps.h"
#include "ops/linear/cuda_many_units.h"

namespace blocksparse::linear {
namespace {

using ptx::shared_address;

struct ManyGradient {
  GradientTables tables;
  GradientTarget target;
  const void* w;        // if the gates' gradients are wanted
  float* gate_parts;    // [blocks][b / 16][b / 8]; null: they are not
  int32_t gate_blocks;  // that have a gate in common, one behind the other
  float* dgates;
  int32_t block_shift;
  int32_t steps;  // of tokens
  int64_t outputs, inputs;
};

template <XOrder Order>
struct GradientMaps {
  ManyX<Order> x;
  CUtensorMap dy;
};

// B = 32 serves smaller blocks too. Order: of x; that of dy is the same, or by tokens where x is gathered.
template <class T, int B, XOrder Order>
struct GradientKernel {
  using Element = T;
  static constexpr int block = B;
  using Maps = GradientMaps<Order>;
  static constexpr XOrder order = Order;
  static constexpr bool first = Order == XOrder::features;
  static constexpr ManyGradientForm form = gradient_form_of(B);
  static constexpr int kTokens = first ? 64 : 32;  // of a step
  static constexpr int kCell = form.cell_inputs, kCells = form.most_cells, kDyBoxes = form.strip_outputs / 64;
  static constexpr int kDyBox = kTokens * 64 * 2, kXBox = kTokens * kCell * 2;
  static constexpr int kStageBytes = kDyBoxes * kDyBox + kCells * kXBox;
  static constexpr int kMostStages = 10;
  static constexpr int kStages = 220 * 1024 / kStageBytes > kMostStages ? kMostStages : 220 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kThreads = 384;
};

using GradientSums = float[128];  // [64, 256] of a warpgroup

struct GradientRing {
  uint32_t stages, full, empty;
  uint32_t phase = 0;
  int stage = 0;

  __device__ uint32_t full_at() const { return full + 8 * static_cast<uint32_t>(stage); }
  __device__ uint32_t empty_at() const { return empty + 8 * static_cast<uint32_t>(stage); }
  template <class K>
  __device__ uint32_t data() const {
    return stages + static_cast<uint32_t>(stage) * K::kStageBytes;
  }
  template <class K>
  __device__ void advance() {
    if (++stage == K::kStages) stage = 0, phase ^= 1;
  }
};

// The steps of units that are a thread block's, in turn: whole units, then its part of the shared ones.
class GradientWork {
 public:
  int unit, first = 0, last = 0;

  __device__ explicit GradientWork(const ManyGradient& g)
      : unit(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)),
        whole_(g.tables.unit_counts().y),
        steps_(g.steps),
        begin_(g.tables.share(static_cast<int>(blockIdx.x))),
        end_(g.tables.share(static_cast<int>(blockIdx.x) + 1)) {}

  __device__ bool next() {
    if (!shared_ && (unit += static_cast<int>(gridDim.x)) < whole_) {
      first = 0, last = steps_;
      return true;
    }
    unit = shared_ ? unit + 1 : begin_.unit;
    shared_ = true;
    first = unit == begin_.unit ? begin_.step : 0;
    last = unit == end_.unit ? end_.step : steps_;
    return unit < end_.unit || (unit == end_.unit && end_.step > first);
  }
  __device__ bool is_whole() const { return first == 0 && last == steps_; }

 private:
  int whole_, steps_;
  GradientShare begin_, end_;
  bool shared_ = false;
};

// Which cells of a unit are a warpgroup's.
template <class K>
struct CellsOfGroup {
  int first, count;
  __device__ CellsOfGroup(const GradientUnit& unit, int group) {
    const int half = (unit.cells + 1) / 2;
    first = K::block == 128 || group == 0 ? 0 : half;
    count = K::block == 128 ? unit.cells : group == 0 ? half : unit.cells - half;
  }
};

// ---- Load -----------------------------------------------------------------------------------------------------------

template <class K>
__device__ inline void load_gradient_box(uint32_t to, const CUtensorMap* map, uint32_t full, int feature, int token) {
  if constexpr (K::first) ptx::load_box(to, map, full, token, feature);
  else ptx::load_box(to, map, full, feature, token);
}

// One warp, a lane a box.
template <class K>
__device__ void feed_gradient(const ManyGradient& g, const typename K::Maps& maps, GradientRing ring) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, box = lane - K::kDyBoxes;
  for (GradientWork work(g); work.next();) {
    const GradientUnit unit = g.tables.units[work.unit];
    const int column = box < 0            ? unit.strip * K::form.strip_outputs + lane * 64
                       : box < unit.cells ? g.tables.chunks[unit.first_cell + box] * K::kCell
                                          : 0;
    [[maybe_unused]] ImageTap tap{};
    if constexpr (K::order == XOrder::images) tap = maps.x.taps.tap_of(column);
    for (int step = work.first; step < work.last; ++step) {
      if (lane == 0) {
        ptx::mbarrier_wait(ring.empty_at(), ring.phase ^ 1);
        ptx::mbarrier_arrive_expect(ring.full_at(),
                                    static_cast<uint32_t>(K::kDyBoxes * K::kDyBox + unit.cells * K::kXBox));
      }
      __syncwarp();
      const uint32_t data = ring.data<K>();
      if (box < 0) {
        load_gradient_box<K>(data + lane * K::kDyBox, &maps.dy, ring.full_at(), column, step * K::kTokens);
      } else if (box < unit.cells) {
        const uint32_t to = data + K::kDyBoxes * K::kDyBox + box * K::kXBox;
        if constexpr (K::order == XOrder::images) {
          const ImagePixel pixel = maps.x.steps.pixel_of(step * K::kTokens);
          load_positions(to, &maps.x.map, ring.full_at(), maps.x.steps.deep, tap, pixel);
        } else {
          load_gradient_box<K>(to, &maps.x.map, ring.full_at(), column, step * K::kTokens);
        }
      }
      ring.advance<K>();
    }
  }
}

// ---- Compute --------------------------------------------------------------------------------------------------------

template <class K, int N>
__device__ void add_steps(GradientSums& sums, GradientRing& ring, int steps, int dy_box, int first_cell) {
  constexpr bool kTurned = !K::first;  // tokens, the depth, are rows of the boxes
  constexpr ptx::Swizzle kOfX = K::first || K::kCell == 64 ? ptx::Swizzle::bytes_128 : ptx::Swizzle::bytes_64;
  constexpr int kStepDy = kTurned ? 128 : 2, kStepX = kTurned ? K::kCell * 2 : 2;
  const bool arrives = threadIdx.x % 128 == 0;
  uint32_t previous = 0;
  for (int i = 0; i < steps; ++i) {
    ptx::mbarrier_wait(ring.full_at(), ring.phase);
    const uint32_t dy = ring.data<K>() + dy_box * K::kDyBox;
    const uint32_t x = ring.data<K>() + K::kDyBoxes * K::kDyBox + first_cell * K::kXBox;
    const uint64_t a = ptx::wgmma_matrix(dy, K::kDyBox, 1024, ptx::Swizzle::bytes_128);
    const uint64_t b = ptx::wgmma_matrix(x, K::kXBox, kTurned ? K::kCell * 16 : 1024, kOfX);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < K::kTokens / 16; ++k) {
      ptx::wgmma<typename K::Element, N, kTurned, kTurned>(sums, a + k * kStepDy, b + k * kStepX);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous != 0) ptx::mbarrier_arrive(previous);
    previous = arrives ? ring.empty_at() : 0;
    ring.advance<K>();
  }
  ptx::wgmma_wait<0>();
  if (previous != 0) ptx::mbarrier_arrive(previous);
}

// ---- Finish ---------------------------------------------------------------------------------------------------------

// All lanes: <S, W> of the 16 x 8, or 8 x 8, in which row and column of block `id` lie.
__device__ inline void leave_gate_part(const ManyGradient& g, int32_t id, int row, int column, float product) {
  product = sum_of_warp(product);
  const int columns = 1 << (g.block_shift - 3), rows = max(columns / 2, 1);
  if (threadIdx.x % 32 == 0) g.gate_parts[(int64_t{id} * rows + row / 16) * columns + column / 8] = product;
}

// Of a warpgroup's [64, 256] the 8 Count columns from 8 `first` on: calls body(block, place in dW, inside, i) for pairs
// of sums of this lane, i-th of all pairs. Tables are read as constants, else every store would be waited for.
template <class K, int Count, class Body>
__device__ inline void for_each_pair(const ManyGradient& g, const GradientUnit& unit, int group, int first, Body body) {
  const int shift = g.block_shift, in_block = (1 << shift) - 1, id_columns = K::kCell >> shift;
  const int ids = K::block > 32 ? 1 : (64 >> shift) * id_columns;
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const CellsOfGroup<K> cells(unit, group);
  const int row = thread / 32 * 16 + lane / 4 + (K::block == 128 ? 64 * group : 0);  // of the strip
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    const int cell = (first + j) * 8 / K::kCell, column = (first + j) * 8 % K::kCell + lane % 4 * 2;
    if (cell >= cells.count) continue;
    const int64_t index = unit.first_cell + cells.first + cell;
    const int64_t input = int64_t{__ldg(g.tables.chunks + index)} * K::kCell + column;
    const int inside_inputs = static_cast<int>(min(max(g.inputs - input, int64_t{0}), int64_t{2}));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
      const int of_cell = K::block > 32 ? 0 : (r >> shift) * id_columns + (column >> shift);
      const int32_t id = __ldg(g.tables.ids + index * ids + of_cell);
      const bool inside = int64_t{unit.strip} * K::form.strip_outputs + r < g.outputs;
      const int64_t at = (((int64_t{id} << shift) + (r & in_block)) << shift) + (input & in_block);
      if (id >= 0) body(id, at, inside ? inside_inputs : 0, 2 * j + half);
    }
  }
}

// sums(2 i) and the next are those of the i-th pair.
template <class K, int Count, class Sums>
__device__ void store_unit(const ManyGradient& g, const GradientUnit& unit, int group, int first, Sums sums) {
  using T = typename K::Element;
  for_each_pair<K, Count>(g, unit, group, first, [&](int32_t id, int64_t at, int inside, int i) {
    g.target.store_pair<T>(id, at, inside, {sums(2 * i), sums(2 * i + 1)});
  });
  if (g.gate_parts == nullptr) return;
  const int shift = g.block_shift, in_block = (1 << shift) - 1;
  float product = 0;
  for_each_pair<K, Count>(g, unit, group, first, [&](int32_t id, int64_t at, int inside, int i) {
    if (shift == 3 || i % 2 == 0) product = 0;
    product += gate_product<T>(g.w, at, inside, {sums(2 * i), sums(2 * i + 1)});
    if (shift > 3 && i % 2 == 0) return;  // 8 rows more of the same block
    leave_gate_part(g, id, static_cast<int>(at >> shift) & in_block, static_cast<int>(at) & in_block, product);
  });
}

// Where a warpgroup leaves partial sums: a thread block has two at most, of a unit that it begins in the midst of, and
// of one that it begins with the first token.
__device__ inline float* part_of(const ManyGradient& g, int thread_block, bool from_start, int group) {
  return g.tables.parts + ((2 * int64_t{thread_block} + from_start) * 2 + group) * (128 * 128) + threadIdx.x % 128;
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1)
    many_gradient([[maybe_unused]] const __grid_constant__ typename K::Maps maps,
                  [[maybe_unused]] const __grid_constant__ ManyGradient g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char stages[];
  __shared__ uint64_t full[K::kMostStages], empty[K::kMostStages];
  const int group = static_cast<int>(threadIdx.x) / 128;
  GradientRing ring{shared_address(stages), shared_address(full), shared_address(empty)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < K::kStages; ++s) {
      ptx::mbarrier_init(shared_address(full + s), 1);
      ptx::mbarrier_init(shared_address(empty + s), 2);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  if (group == 2) {
    ptx::setmaxnreg_dec<56>();
    if (threadIdx.x < 2 * 128 + 32) feed_gradient<K>(g, maps, ring);
    return;
  }
  ptx::setmaxnreg_inc<224>();
  GradientSums sums;
  for (GradientWork work(g); work.next();) {
    const GradientUnit unit = g.tables.units[work.unit];
    const CellsOfGroup<K> cells(unit, group);
    const int dy_box = K::block == 128 ? group : 0, steps = work.last - work.first;
#pragma unroll
    for (float& sum : sums) sum = 0;
    const int quarters = __shfl_sync(~0u, (cells.count * K::kCell + 63) / 64, 0);
    if (quarters == 4) add_steps<K, 256>(sums, ring, steps, dy_box, cells.first);
    else if (quarters == 3) add_steps<K, 192>(sums, ring, steps, dy_box, cells.first);
    else if (quarters == 2) add_steps<K, 128>(sums, ring, steps, dy_box, cells.first);
    else add_steps<K, 64>(sums, ring, steps, dy_box, cells.first);  // also where it has no cell
    if (work.is_whole()) {
      store_unit<K, 32>(g, unit, group, 0, [&](int i) { return sums[i]; });
    } else {
      float* part = part_of(g, static_cast<int>(blockIdx.x), work.first == 0, group);
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        if (i < 32 * quarters) part[i * 128] = sums[i];
      }
    }
  }
#endif
}

// Where the parts of a unit are: of the thread blocks from `first` to `last`.
struct GradientParts {
  int first, last;
  __device__ bool is_whole() const { return first == last; }
};

// From the last thread block that begins before the unit or with it to the last that begins in it. Called by all
// threads.
__device__ inline GradientParts parts_of(const GradientShare* shares, int grid, int unit) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool counts_first =
      thread < grid && (shares[thread].unit < unit || (shares[thread].unit == unit && shares[thread].step == 0));
  const int first = __syncthreads_count(counts_first) - 1;
  return {first, __syncthreads_count(thread < grid && shares[thread].unit <= unit) - 1};
}

// How many thread blocks finish a unit together, and into how many runs the parts are divided that are added side by
// side. Of a single unit with 132 parts, 16 thread blocks that add them in one run take 20 us.
template <int Slices, int Runs>
struct GradientCombine {
  static constexpr int kSlices = Slices, kRuns = Runs, kThreads = 256 * Runs;
  static constexpr int kEights = 32 / Slices, kSums = 4 * kEights;  // of a thread, of its 128
  static constexpr int kAtOnce = 32 / kSums;                        // parts under way
};
using CombineFew = GradientCombine<32, 4>;  // units
using CombineMany = GradientCombine<16, 1>;
constexpr int64_t kFewSharedUnits = 8;

// Units that several thread blocks shared: the parts of a run in the order of tokens, then the runs.
template <class K, class C>
__global__ void __launch_bounds__(C::kThreads) gradient_combine(const __grid_constant__ ManyGradient g, int32_t grid) {
  constexpr int kSums = C::kSums;
  ptx::griddepcontrol_wait();
  const int2 counts = g.tables.unit_counts();
  const int unit = counts.y + static_cast<int>(blockIdx.x) / C::kSlices;
  const int slice = static_cast<int>(blockIdx.x) % C::kSlices;
  if (unit >= counts.x) return;
  __shared__ GradientShare shares[kMostGradientGrid + 1];
  [[maybe_unused]] __shared__ float of_run[C::kRuns][kSums][256];
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i <= grid; i += C::kThreads) shares[i] = g.tables.share(i);
  __syncthreads();
  const GradientParts parts = parts_of(shares, grid, unit);
  if (parts.is_whole()) return;  // and has been stored
  const int group = thread % 256 / 128, run = thread / 256, count = parts.last - parts.first + 1;
  const GradientUnit of_unit = g.tables.units[unit];
  const bool used = slice * C::kEights * 8 < CellsOfGroup<K>(of_unit, group).count * K::kCell;
  const int end = used ? parts.first + count * (run + 1) / C::kRuns : 0;
  float sums[kSums] = {};
  for (int c = parts.first + count * run / C::kRuns; c < end; c += C::kAtOnce) {
    float more[C::kAtOnce][kSums];
#pragma unroll
    for (int j = 0; j < C::kAtOnce; ++j) {
      const int at = min(c + j, end - 1);
      const bool has_step = shares[at].unit != shares[at + 1].unit || shares[at].step != shares[at + 1].step;
      const float* part = part_of(g, at, at == parts.first, group) + slice * kSums * 128;
#pragma unroll
      for (int i = 0; i < kSums; ++i) more[j][i] = c + j < end && has_step ? part[i * 128] : 0;
    }
#pragma unroll
    for (int j = 0; j < C::kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += more[j][i];
    }
  }
  if constexpr (C::kRuns > 1) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) of_run[run][i][thread % 256] = sums[i];
    __syncthreads();
    if (run > 0) return;
    for (int other = 1; other < C::kRuns; ++other) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += of_run[other][i][thread];
    }
  }
  store_unit<K, C::kEights>(g, of_unit, group, slice * C::kEights, [&](int i) { return sums[i]; });
}

// A warp a gate: the parts of its blocks in order of the lanes, then the lanes.
__global__ void __launch_bounds__(256) gradient_of_gates(const __grid_constant__ ManyGradient g, int32_t gates) {
  ptx::griddepcontrol_wait();
  const int columns = 1 << (g.block_shift - 3), parts = g.gate_blocks * columns * max(columns / 2, 1);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (auto id = static_cast<int32_t>((blockIdx.x * 256 + threadIdx.x) / 32); id < gates;
       id += static_cast<int32_t>(gridDim.x * 8)) {
    float sum = 0;
    for (int i = lane; i < parts; i += 32) sum += g.gate_parts[int64_t{id} * parts + i];
    sum = sum_of_warp(sum);
    if (lane == 0) g.dgates[id] = (g.target.accumulate ? g.dgates[id] : 0) + sum;
  }
}

}  // namespace
}  // namespace blocksparse::linear
