// y = f(x W^T + bias + residual) for tens to thousands of tokens, and dgrad likewise, on Hopper.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32; x and y also features-first
// Who does what
//   grid      a thread block an SM. A job is a row of blocks, or a slice of one that is cut, and 64 or 128 tokens; each
//             thread block takes job after job, longest first, there and back
//   load      four warps fill a ring of stages, each a box of x and the block of W that meets it (b = 128: a half),
//             whatever job they belong to. Tables and W come before x is waited for, so they cost nothing behind a
//             kernel that lets this one begin early
//   compute   wgmma by two warpgroups, a job each in turn: tokens are its rows, outputs its columns
//   finish    from registers, while the other warpgroup multiplies; a second kernel adds the slices of cut rows
//             (store.cuh)
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/row_wgmma/feed.cuh"
#include "gemm/cuda/row_wgmma/store.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

// One stage. Descriptors count in units of 16 bytes.
template <class K>
__device__ inline void multiply_stage(uint32_t stage, Sums<K>& sums) {
  constexpr int kRow = K::kDepth * 2;  // bytes of a row of a box of inputs or outputs
  constexpr auto kSwizzle = K::kDepth == 64 ? ptx::Swizzle::bytes_128 : ptx::Swizzle::bytes_64;
  constexpr int kXHalf = (K::x_first ? K::kDepth * 128 : 64 * kRow) / 16;
  constexpr int kXStep = K::x_first ? 128 : 2, kWStep = K::by_in ? kRow : 2;
  const uint64_t x = K::x_first ? ptx::wgmma_matrix(stage, 0, 1024, ptx::Swizzle::bytes_128)
                                : ptx::wgmma_matrix(stage, 0, 8 * kRow, kSwizzle);
  const uint64_t w = ptx::wgmma_matrix(stage + K::kXBytes, K::kDepth * kRow, 8 * kRow, kSwizzle);
  ptx::wgmma_fence();
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int k = 0; k < K::kDepth / 16; ++k) {
      ptx::wgmma<typename K::Element, K::block, K::x_first, K::by_in>(sums[half], x + half * kXHalf + k * kXStep,
                                                                      w + k * kWStep);
    }
  }
  ptx::wgmma_commit();
}

// A warpgroup that multiplies: job after job in turn with the others, whose sums are stored meanwhile.
template <class K>
class Consumer {
 public:
  __device__ Consumer(const Args& p, Shared<K>& shared, uint32_t stages, int warpgroup)
      : p_(p), shared_(shared), stages_(stages), warpgroup_(warpgroup) {}

  __device__ void run() {
    for (bool first = warpgroup_ == 0;; first = false) {
      if (!first) take_turn();
      shared_.ring.wait_full(place_);
      const int4 read = ptx::ld_shared_16(shared_address(&shared_.notes[place_.stage]));
      // The same in all lanes, as wgmma's conditions want it.
      const Note note{__shfl_sync(~0u, read.x, 0), read.y, read.z, read.w};
      if (note.stages == -K::kConsumers) return;
      if (note.stages <= 0) {
        release(place_);
        place_.advance(K::kStages);
        pass_turn();
        if (note.stages < 0) return;
      }
      Sums<K> sums{};
      if constexpr (K::gated) walk_gated(note.stages, sums);
      else walk(note.stages, sums);
      Storer<K>(p_, note).store(sums);
    }
  }

 private:
  static constexpr int kTurn = 1, kTwo = 256;  // named barriers: kTurn + who has the turn, of that and the one before

  // A parity does not tell where in the ring a job begins that is laps ahead: the one in front says so.
  __device__ void take_turn() {
    ptx::bar_sync(kTurn + warpgroup_, kTwo);
    place_ = shared_.turn;
  }
  __device__ void pass_turn() const {
    if (threadIdx.x % 128 == 0) shared_.turn = place_;
    __syncwarp();
    ptx::bar_arrive(kTurn + (warpgroup_ + 1) % K::kConsumers, kTwo);
  }
  __device__ void release(const cuda::RingPlace& place) const { shared_.ring.release_warp(place); }

  // A stage is given back when the next one is on its way through the tensor cores.
  __device__ void walk(int stages, Sums<K>& sums) {
    cuda::RingPlace before = place_;
    for (int i = 0; i < stages; ++i) {
      shared_.ring.wait_full(place_);
      multiply_stage<K>(place_.in(stages_, K::kStageBytes), sums);
      ptx::wgmma_wait<1>();
      if (i > 0) release(before);
      before = place_;
      place_.advance(K::kStages);
    }
    if (stages > 0) pass_turn();
    ptx::wgmma_wait<0>();
    if (stages > 0) release(before);
  }

  // The sums of each block alone, times its gate.
  __device__ void walk_gated(int stages, Sums<K>& sums) {
#pragma unroll 1
    for (int i = 0; i < stages; i += K::kSteps) {
      Sums<K> part{};
      float gate = 0;
#pragma unroll
      for (int step = 0; step < K::kSteps; ++step) {
        shared_.ring.wait_full(place_);
        gate = shared_.gates[place_.stage];
        multiply_stage<K>(place_.in(stages_, K::kStageBytes), part);
        ptx::wgmma_wait<0>();
        release(place_);
        place_.advance(K::kStages);
      }
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
        for (int k = 0; k < K::kSums; ++k) sums[half][k] += gate * part[half][k];
      }
    }
    if (stages > 0) pass_turn();
  }

  const Args& p_;
  Shared<K>& shared_;
  uint32_t stages_;
  int warpgroup_;
  cuda::RingPlace place_;
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) row_wgmma_product([[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Shared<K> shared;
  const uint32_t stages = shared_address(staged);
  if (!p.early) ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
    shared.ring.init(K::kStages, 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == K::kConsumers) {
    Feeder<K>(p, shared, stages, static_cast<int>(threadIdx.x) / 32 % K::kFeeders).run();
    return;
  }
  ptx::griddepcontrol_wait();  // y, and what the last step reads
  Consumer<K>(p, shared, stages, warpgroup).run();
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class K>
Status make_maps(const Product& p, Args& args) {
  const bool first = p.x.features_first();
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = first ? p.x.n : p.x.features,
                                            .rows = first ? p.x.features : p.x.n,
                                            .row_stride = first ? p.x.feature_stride : p.x.token_stride,
                                            .box_columns = static_cast<uint32_t>(first ? 64 : K::kDepth),
                                            .box_rows = static_cast<uint32_t>(first ? K::kDepth : K::tokens)},
                                           args.x));
  if (p.layout.blocks == 0) return {};  // a map of nothing is refused, and not needed
  const int64_t rest = p.x.features % K::block;
  cuda::BoxedMatrix w{.data = p.w,
                      .columns = K::block,
                      .rows = K::block,
                      .row_stride = K::block,
                      .box_columns = K::kDepth,
                      .box_rows = static_cast<uint32_t>(K::by_in ? K::kDepth : K::block),
                      .matrices = p.layout.blocks,
                      .matrix_stride = K::block * K::block};
  BS_RETURN_IF_ERROR(cuda::make_tensor_map(w, args.w));
  if (rest == 0) return {};
  (K::by_in ? w.rows : w.columns) = rest;
  return cuda::make_tensor_map(w, args.w_last);
}

// body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int64_t block, int tokens, bool by_in, bool x_first, bool gated, Body body) {
  const auto flags = [&]<int Block, int Tokens, bool Gated>() {
    if (by_in) {
      return x_first ? body.template operator()<Kernel<T, Block, Tokens, true, true, Gated>>()
                     : body.template operator()<Kernel<T, Block, Tokens, true, false, Gated>>();
    }
    return x_first ? body.template operator()<Kernel<T, Block, Tokens, false, true, Gated>>()
                   : body.template operator()<Kernel<T, Block, Tokens, false, false, Gated>>();
  };
  const auto of_block = [&]<int Block>() {
    if (gated) return flags.template operator()<Block, 64, true>();
    return tokens == 64 ? flags.template operator()<Block, 64, false>()
                        : flags.template operator()<Block, 128, false>();
  };
  return block == 32   ? of_block.template operator()<32>()
         : block == 64 ? of_block.template operator()<64>()
                       : of_block.template operator()<128>();
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const CudaProblem& problem = call.problem;
  const int32_t tokens = tokens_of_tile(problem, call.card);
  const bool cut = problem.slots > 0, sliced = cut && adds_slices(problem);
  const int64_t tiles = ceil_div(p.x.n, tokens), jobs = (problem.output_blocks() + problem.slots) * tiles;
  Args args{.x = {},
            .w = {},
            .w_last = {},
            .walk = walk_on_device(p.layout, p.by_in),
            .jobs = static_cast<int32_t>(jobs),
            .tiles = static_cast<int32_t>(tiles),
            .last_input = p.x.features % problem.block == 0 ? -1 : static_cast<int32_t>(problem.input_blocks() - 1),
            .cut = cut,
            .partial = sliced ? static_cast<float*>(call.workspace.data) : nullptr,
            .gates = static_cast<const float*>(p.gates),
            .early = p.x_is_last,
            .plain = without_epilogue(p),
            .n = static_cast<int32_t>(p.x.n),
            .outputs = p.outputs(),
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation, p.glu ? p.y.features : 0}};
  return with_kernel<T>(problem.block, tokens, p.by_in, problem.x_first, problem.gated, [&]<class K>() {
    BS_RETURN_IF_ERROR(make_maps<K>(p, args));
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = std::min<int64_t>(jobs, call.card.multiprocessors),
                                     .threads = K::kThreads,
                                     .shared_bytes = K::kSharedBytes,
                                     .stream = stream_of(call),
                                     .overlap = true},
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
Status prepare() {
  for (int block : {32, 64, 128}) {
    for (int flags = 0; flags < 12; ++flags) {
      const int tokens = flags / 4 == 1 ? 128 : 64;
      BS_RETURN_IF_ERROR(
          with_kernel<T>(block, tokens, flags % 2 == 0, flags / 2 % 2 == 0, flags / 4 == 2, [&]<class K>() {
            BS_RETURN_IF_ERROR(cuda::prepare_for_many(row_wgmma_combine<T, K::block>, 0));
            return cuda::prepare_for_many(row_wgmma_product<K>, K::kSharedBytes);
          }));
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
