// y = f(x W^T + bias + residual) for tens to thousands of tokens, and dgrad likewise, on Hopper.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32; y also features-first
// Who does what
//   grid      a thread block an SM. A job is a row of blocks, or a slice of a cut one, and 64, 128 or 256 tokens. Each
//             thread block takes job after job, longest first, there and back; with hubs, as rows have been dealt
//   load      two warps fill a ring of stages, across the borders of jobs. A stage is a box of x and the block of
//             W that meets it (b = 128: half of it). In a chain where only x is new, tables and W are read before x is
//             waited for
//   compute   wgmma by two warpgroups, a job each in turn: tokens are its rows, outputs its columns
//   finish    through shared memory, or from registers if b = 32, while the other warpgroup multiplies. A second kernel
//             adds the slices of cut rows (store.cuh)
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

#include "core/ceil_div.h"
#include "core/index.h"
#include "core/schedule.h"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/row_wgmma/feed.cuh"
#include "gemm/cuda/row_wgmma/store.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

// Multiplies one stage. Descriptors count in units of 16 bytes.
template <class K>
__device__ inline void multiply_stage(uint32_t stage, Sums<K>& sums) {
  constexpr int kRow = K::kDepth * 2;  // bytes of a row of a box of inputs or outputs
  constexpr auto kSwizzle = K::kDepth == 64 ? ptx::Swizzle::bytes_128 : ptx::Swizzle::bytes_64;
  constexpr int kXHalf = 64 * kRow / 16, kXStep = 2, kWStep = K::by_in ? kRow : 2;
  const uint64_t x = ptx::wgmma_matrix(stage, 0, 8 * kRow, kSwizzle);
  const uint64_t w = ptx::wgmma_matrix(stage + K::kXBytes, K::kDepth * kRow, 8 * kRow, kSwizzle);
  ptx::wgmma_fence();
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int k = 0; k < K::kDepth / 16; ++k) {
      ptx::wgmma<typename K::Element, K::block, false, K::by_in>(sums[half], x + half * kXHalf + k * kXStep,
                                                                 w + k * kWStep);
    }
  }
  ptx::wgmma_commit();
}

// A warpgroup that multiplies every other job of this thread block, while the other warpgroup stores the sums of the
// job before.
template <class K>
class Consumer {
 public:
  __device__ Consumer(const Args& p, Shared<K>& shared, uint32_t stages, int warpgroup)
      : p_(p), jobs_(p), shared_(shared), stages_(stages), warpgroup_(warpgroup) {}

  __device__ void run() {
    Job job = jobs_.find(warpgroup_);
    if (warpgroup_ == 1) skip(jobs_.find(0));
    for (int wave = warpgroup_; wave < jobs_.waves(); wave += 2) {
      // These loads from memory overlap this job's products.
      const Job others = jobs_.find(wave + 1), next = jobs_.find(wave + 2);
      const int stages = jobs_.stages_of(job);
      // Jobs are begun in turn. A warpgroup that is laps behind would take a stage's barrier for that of two laps
      // before.
      if (wave > 0) ptx::bar_sync(kTurn + warpgroup_, 256);
      Sums<K> sums{};
      walk(stages, sums);
      if (wave + 1 < jobs_.waves()) ptx::bar_arrive(kTurn + (warpgroup_ ^ 1), 256);
      complete();
      if (p_.early && wave == warpgroup_) ptx::griddepcontrol_wait();  // y and what the epilogue reads
      if (job.to >= 0)
        Storer<K>(p_, job, stages_ + K::kStages * K::kStageBytes + warpgroup_ * K::kStoreBytes).store(sums);
      skip(others);
      job = next;
    }
  }

 private:
  static constexpr int kTurn = 1;  // named barriers: kTurn + the warpgroup whose turn it is

  __device__ void skip(const Job& job) { place_.skip(jobs_.stages_of(job), K::kStages); }

  // A stage is given back when the next one is in the tensor cores.
  __device__ void walk(int stages, Sums<K>& sums) {
    for (int i = 0; i < stages; ++i) {
      shared_.ring.wait_full(place_);
      multiply_stage<K>(place_.in(stages_, K::kStageBytes), sums);
      ptx::wgmma_wait<1>();
      if (i > 0) shared_.ring.release_warp(before_);
      before_ = place_;
      place_.advance(K::kStages);
    }
    pending_ = stages > 0;
  }

  // The other warpgroup begins its job meanwhile.
  __device__ void complete() {
    ptx::wgmma_wait<0>();
    if (pending_) shared_.ring.release_warp(before_);
  }

  const Args& p_;
  Jobs<K> jobs_;
  Shared<K>& shared_;
  uint32_t stages_;
  int warpgroup_;
  bool pending_ = false;  // the last stage of a job has not been given back
  cuda::RingPlace place_, before_;
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) row_wgmma_product([[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Shared<K> shared;
  const uint32_t stages = shared_address(staged);
  if (threadIdx.x == 0) {
    shared.ring.init(K::kStages, 4);
    ptx::fence_mbarrier_init();
  }
  // One thread makes the barriers; the warps that copy fetch the maps. With other threads for both, the first stage
  // came up to 1.4 us later (H100, 2026-11-25).
  if (threadIdx.x >= 256 && threadIdx.x < 256 + 32 * K::kFeeders && threadIdx.x % 32 == 0) {
    ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 2) {
    if constexpr (K::kGivesRegisters) ptx::setmaxnreg_dec<K::kFeedRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (warp < K::kFeeders) Feeder<K>(p, shared, stages, warp).run();
    return;
  }
  if constexpr (K::kGivesRegisters) ptx::setmaxnreg_inc<K::kRegisters>();
  Consumer<K>(p, shared, stages, warpgroup).run();
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class K>
Status make_maps(const Product& p, Args& args) {
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = static_cast<uint32_t>(K::kDepth),
                                            .box_rows = static_cast<uint32_t>(K::tokens)},
                                           args.x));
  if (p.layout.blocks == 0) return {};  // an empty map is refused, and not needed
  cuda::BoxedMatrix w{.data = p.w,
                      .columns = K::block,
                      .rows = p.layout.blocks * K::block,
                      .row_stride = K::block,
                      .box_columns = K::kDepth,
                      .box_rows = static_cast<uint32_t>(K::by_in ? K::kDepth : K::block)};
  BS_RETURN_IF_ERROR(cuda::make_tensor_map(w, args.w));
  const int64_t rest = p.x.features % K::block;
  if (rest == 0) return {};
  w.rows = K::block, w.matrices = p.layout.blocks, w.matrix_stride = K::block * K::block;
  (K::by_in ? w.rows : w.columns) = rest;
  return cuda::make_tensor_map(w, args.w_last);
}

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int64_t block, int tokens, bool by_in, bool dealt, Body body) {
  const auto of_kind = [&]<int Block, bool ByIn, bool Dealt>() {
    if constexpr (Block == 32) {
      if (tokens == 256) return body.template operator()<Kernel<T, Block, 256, ByIn, Dealt>>();
    }
    if constexpr (may_be_dealt(Block, 64) || !Dealt) {
      if (tokens == 64) return body.template operator()<Kernel<T, Block, 64, ByIn, Dealt>>();
    }
    return body.template operator()<Kernel<T, Block, 128, ByIn, Dealt>>();
  };
  const auto of_block = [&]<int Block>() {
    if constexpr (may_be_dealt(Block, 128)) {
      if (dealt) {
        return by_in ? of_kind.template operator()<Block, true, true>()
                     : of_kind.template operator()<Block, false, true>();
      }
    }
    return by_in ? of_kind.template operator()<Block, true, false>()
                 : of_kind.template operator()<Block, false, false>();
  };
  return block == 32   ? of_block.template operator()<32>()
         : block == 64 ? of_block.template operator()<64>()
                       : of_block.template operator()<128>();
}

// Says where the schedule is, if there is one for so many tiles.
inline void find_schedule(const Product& p, const CudaProblem& problem, int64_t tiles, Args& args) {
  const int64_t rows = problem.output_blocks(), others = problem.input_blocks();
  const ScheduleShape shape = schedule_shape(rows, static_cast<int32_t>(tiles));
  const auto words = index_sections(p.by_in ? others : rows, p.by_in ? rows : others, problem.blocks).words;
  const auto* numbers = reinterpret_cast<const uint16_t*>(p.layout.index + words);
  args.schedule = numbers + (p.by_in ? schedule_numbers(others) : 0) + shape.at;
  args.scheduled = p.layout.index + offsetof(Header, reserved) / sizeof(int32_t) + kScheduled;
  args.direction = p.by_in ? 2 : 1;
  args.groups = shape.groups, args.schedule_waves = shape.waves;
  args.log2_tiles = static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(tiles))) - 1;
}

template <class T>
Status launch_at_once(const Product& p, const CudaCall& call) {
  const CudaProblem& problem = call.problem;
  const int32_t tokens = tokens_of_tile(problem, call.card);
  const bool cut = problem.slots > 0, sliced = cut && adds_slices(problem);
  const int64_t tiles = ceil_div(p.x.n, tokens), rows = problem.output_blocks() + problem.slots, jobs = rows * tiles;
  const bool rows_inside = takes_rows_inside(problem);
  const bool dealt = is_dealt(problem, tokens, call.card);
  const int64_t grid = dealt ? tiles * schedule_shape(problem.output_blocks(), static_cast<int32_t>(tiles)).groups
                             : std::min<int64_t>(jobs, call.card.multiprocessors);
  Args args{.x = {},
            .w = {},
            .w_last = {},
            .walk = walk_on_device(p.layout, p.by_in),
            .jobs = static_cast<int32_t>(jobs),
            .waves = static_cast<int32_t>(ceil_div(jobs, grid)),
            .inside = cuda::Divider(rows_inside ? rows : tiles),
            .rows_inside = rows_inside,
            .last_input = p.x.features % problem.block == 0 ? -1 : static_cast<int32_t>(problem.input_blocks() - 1),
            .cut = cut,
            .partial = sliced ? static_cast<float*>(call.workspace.data) : nullptr,
            .schedule = nullptr,
            .scheduled = nullptr,
            .direction = 0,
            .groups = 0,
            .schedule_waves = 0,
            .log2_tiles = 0,
            .early = p.x_is_last,
            .plain = without_epilogue(p),
            .n = static_cast<int32_t>(p.x.n),
            .outputs = p.y.features,
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  if (dealt) find_schedule(p, problem, tiles, args);
  return with_kernel<T>(problem.block, tokens, p.by_in, dealt, [&]<class K>() {
    BS_RETURN_IF_ERROR(make_maps<K>(p, args));
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = grid,
                                     .threads = K::kThreads,
                                     .shared_bytes = K::kSharedBytes,
                                     .stream = stream_of(call),
                                     .overlap = args.early},
                                    row_wgmma_product<K>, args));
    if (!sliced) return Status();
    const int64_t pairs = most_splits(problem) * p.x.n * K::block / 2;
    return cuda::launch({.blocks = std::min<int64_t>(ceil_div(pairs, kCombineThreads), call.card.multiprocessors * 4),
                         .threads = kCombineThreads,
                         .stream = stream_of(call),
                         .overlap = true},
                        row_wgmma_combine<T, K::block>, args);
  });
}

template <class T>
Activations tokens_of(const Activations& a, int64_t first, int64_t count) {
  if (a.data == nullptr) return a;
  Activations part = a;
  part.data = static_cast<const T*>(a.data) + first * a.token_stride;
  part.n = count;
  return part;
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const int64_t most = tokens_of_launch(call.problem);
  if (p.x.n <= most) return launch_at_once<T>(p, call);
  for (int64_t first = 0; first < p.x.n; first += most) {
    const int64_t count = std::min(most, p.x.n - first);
    Product part = p;
    part.x = tokens_of<T>(p.x, first, count), part.y = tokens_of<T>(p.y, first, count);
    part.residual = tokens_of<T>(p.residual, first, count);
    part.x_is_last = p.x_is_last && first == 0;
    CudaProblem problem = call.problem;
    problem.n = count;
    BS_RETURN_IF_ERROR(launch_at_once<T>(part, {problem, call.card, call.workspace, call.stream}));
  }
  return Status();
}

template <class T>
Status prepare() {
  const auto of = [](int64_t block, int tokens, bool by_in, bool dealt) {
    return with_kernel<T>(block, tokens, by_in, dealt, [&]<class K>() {
      BS_RETURN_IF_ERROR(cuda::prepare_for_many(row_wgmma_combine<T, K::block>, 0));
      return cuda::prepare_for_many(row_wgmma_product<K>, K::kSharedBytes);
    });
  };
  for (const int tokens : {64, 128, 256}) {
    for (const int block : {32, 64, 128}) {
      for (const bool by_in : {false, true}) {
        BS_RETURN_IF_ERROR(of(block, tokens, by_in, false));
        if (may_be_dealt(block, tokens)) BS_RETURN_IF_ERROR(of(block, tokens, by_in, true));
      }
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
