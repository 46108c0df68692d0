// y = f(x W^T + bias + residual) for some hundred tokens, and dgrad likewise, b = 32 on Hopper: W is read once, x comes
// in boxes of 128 tokens, and all that a row of blocks needs is under way at once.
//   x [n, inputs]   w [blocks, 32, 32]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      as many thread blocks as fit the card at once, several on every SM. A job is a row of blocks (or four
//             rows: see Group) and 128 tokens; each takes every so many, there and back, longest first
//   load      one warp fills a ring of stages, each a box of x and the block of W that meets it, with a note of what to
//             do. Tables and W come before x is waited for, so they cost nothing behind a kernel that lets this one
//             begin early
//   compute   wgmma by one or two warpgroups: tokens are its rows, outputs its columns
//   finish    from registers, while the ring fills for the next job
// Slices of a row that is cut are jobs of one cluster, whose thread blocks leave their sums in the workspace and then
// add a part of them each (finish.cuh). Where there are no clusters, rows are walked whole.
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/row_wgmma/feed.cuh"
#include "gemm/cuda/row_wgmma/slices.cuh"
#include "gemm/cuda/wgmma/maps.cuh"

namespace blocksparse::gemm::row_wgmma {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

template <class K, int Count>
using Sums = float[K::kHalves][Count * K::kSums];

// One stage, whose `Count` blocks of W lie one below the other.
template <class K, int Count>
__device__ inline void multiply_stage(uint32_t stage, int warpgroup, Sums<K, Count>& sums) {
  constexpr int kHalf = 64 * kBlock * 2 / 16;  // of x, in the descriptor's units of 16 bytes
  const uint64_t x =
      ptx::wgmma_matrix(stage, 0, 512, ptx::Swizzle::bytes_64) + static_cast<uint64_t>(warpgroup * K::kHalves * kHalf);
  const uint64_t w = ptx::wgmma_matrix(stage + K::kXBytes, 0, 512, ptx::Swizzle::bytes_64);
  ptx::wgmma_fence();
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k) {
      ptx::wgmma<typename K::Element, Count * kBlock, false, K::by_in>(sums[half], x + half * kHalf + k * 2,
                                                                       w + k * (K::by_in ? 64 : 2));
    }
  }
  ptx::wgmma_commit();
}

// Of `Count` rows of blocks, p.groups apart; a lane stores 8 outputs of a token.
template <class K, int Count>
__device__ inline void store_vectors(const Args& p, int to, int first_token, const Sums<K, Count>& sums) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int part = 0; part < 2 * Count; ++part) {
      const int row = part % 2, g = part / 2;  // 8 tokens of a warp's 16; row of blocks
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* sum = sums[half] + g * K::kSums + 4 * j + 2 * row;
        words[j] = narrow_pair(sum[0], sum[1], typename K::Element{});
      }
      cuda::turn_quad(words);
      const int token = first_token + half * 64 + thread / 32 * 16 + row * 8 + lane / 4;
      const int64_t output = int64_t{to + g * p.groups} * kBlock + lane % 4 * 8;
      if (token < p.n && output < p.outputs) {
        *reinterpret_cast<uint4*>(p.finish.at<typename K::Element>(token, output)) = {words[0], words[1], words[2],
                                                                                      words[3]};
      }
    }
  }
}

template <class K>
__device__ inline void store_elements(const Args& p, int to, int first_token, const Sums<K, 1>& sums) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < K::kSums; ++i) {
      const int token = first_token + half * 64 + thread / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
      const int64_t output = int64_t{to} * kBlock + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (token < p.n && output < p.outputs) p.finish.store<typename K::Element>(token, output, sums[half][i]);
    }
  }
}

// A warpgroup that multiplies.
template <class K>
class Consumer {
 public:
  __device__ Consumer(const Args& p, Shared<K>& shared, uint32_t stages, int warpgroup)
      : p_(p), shared_(shared), stages_(stages), warpgroup_(warpgroup) {}

  __device__ void run() {
    while (true) {
      const int flags = look();
      if ((flags & kExit) != 0) return;
      if (K::group == 1 || (flags & kShared) == 0) walk<1>();
      else walk<K::group>();
    }
  }

 private:
  // The flags of the stage, as wgmma's conditions want them: the same in all lanes.
  __device__ int look() {
    shared_.ring.wait_full(place_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.notes[place_.stage]));
    return __shfl_sync(~0u, note_.x, 0);
  }
  // A list. The other thread blocks of the SM multiply while this one waits for its products.
  template <int Count>
  __device__ void walk() {
    Sums<K, Count> sums{};
    int flags;
    do {
      flags = look();
      if ((flags & kData) != 0) {
        multiply_stage<K, Count>(place_.in(stages_, K::kStageBytes), warpgroup_, sums);
        ptx::wgmma_wait<0>();
      }
      shared_.ring.release_warp(place_);
      place_.advance(K::kStages);
    } while ((flags & kLast) == 0);
    const int token = note_.z + warpgroup_ * K::kHalves * 64;
    if constexpr (K::clusters) {
      if (note_.w != 0) return slices_.share(p_, shared_, note_, sums);
    }
    if constexpr (K::plain) store_vectors<K, Count>(p_, note_.y, token, sums);
    else store_elements<K>(p_, note_.y, token, sums);
  }

  const Args& p_;
  Shared<K>& shared_;
  uint32_t stages_;
  int warpgroup_;
  cuda::RingPlace place_;
  int4 note_{0, 0, 0, 0};
  Slices<K> slices_;
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    row_wgmma_product([[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Shared<K> shared;
  const uint32_t stages = shared_address(staged);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (!p.early) ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    if (p.has_w) ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
    shared.ring.init(K::kStages, K::kConsumers * 4);
    for (uint64_t& slices : shared.slices) {
      if (K::clusters) ptx::mbarrier_init(shared_address(&slices), K::together);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (K::clusters) ptx::cluster_arrive();
  if (warpgroup == K::kConsumers) {
    Feeder<K>(p, shared, stages).run();
    __syncwarp();
    if (K::clusters) ptx::cluster_wait();
    return;
  }
  ptx::griddepcontrol_wait();            // y, and what the last step reads
  if (K::clusters) ptx::cluster_wait();  // the others' barriers are there
  Consumer<K>(p, shared, stages, warpgroup).run();
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(bool by_in, bool fours, bool plain, bool clusters, Body body) {
  if (fours) return body.template operator()<Kernel<T, false, 4, true, false>>();
  const auto with = [&]<bool ByIn, bool Plain>() {
    return clusters ? body.template operator()<Kernel<T, ByIn, 1, Plain, true>>()
                    : body.template operator()<Kernel<T, ByIn, 1, Plain, false>>();
  };
  if (by_in) return plain ? with.template operator()<true, true>() : with.template operator()<true, false>();
  return plain ? with.template operator()<false, true>() : with.template operator()<false, false>();
}

inline Status make_maps(const Product& p, Args& args) {
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = kBlock,
                                            .box_rows = kTokens},
                                           args.x));
  if (p.layout.blocks > 0) {  // a map of nothing is refused, and not needed
    BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.w,
                                              .columns = kBlock,
                                              .rows = p.layout.blocks * kBlock,
                                              .row_stride = kBlock,
                                              .box_columns = kBlock,
                                              .box_rows = kBlock},
                                             args.w));
    args.has_w = true;
  }
  return {};
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const bool plain = wgmma::is_plain(p), fours = plain && rows_in_fours(call.problem);
  const int64_t slices = ceil_div(p.x.n, kTokens), rows = call.problem.output_blocks();
  const bool clusters = !fours && call.problem.slots > 0 && slices_fit_clusters(call.problem);
  const int64_t pieces = rows + call.problem.slots;
  const int64_t items = fours ? rows / 4 : clusters ? round_up(pieces, kClusterPieces) : pieces;
  const int64_t jobs = items * slices;
  Args args{.x = {},
            .w = {},
            .walk = walk_on_device(p.layout, p.by_in),
            .jobs = static_cast<int32_t>(jobs),
            .slices = static_cast<int32_t>(slices),
            .groups = static_cast<int32_t>(rows / 4),
            .cut = call.problem.slots > 0,
            .partial = clusters ? static_cast<float*>(call.workspace.data) : nullptr,
            .early = p.x_is_last,
            .n = static_cast<int32_t>(p.x.n),
            .outputs = p.y.features,
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(make_maps(p, args));
  return with_kernel<T>(p.by_in, fours, plain, clusters, [&]<class K>() {
    // Clusters find places in one part of the card alone, so some places stay empty: more would run behind the others.
    const int64_t places = int64_t{call.card.multiprocessors} * K::kResident;
    return cuda::launch({.blocks = std::min(jobs, K::clusters ? places * 9 / 10 / K::together * K::together : places),
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call),
                         .overlap = true,
                         .cluster = K::together},
                        row_wgmma_product<K>, args);
  });
}

template <class T>
Status prepare() {
  for (bool by_in : {false, true}) {
    for (bool fours : {false, true}) {
      for (bool plain : {false, true}) {
        for (bool clusters : {false, true}) {
          BS_RETURN_IF_ERROR(with_kernel<T>(by_in, fours, plain, clusters, [&]<class K>() {
            return cuda::prepare_for_many(row_wgmma_product<K>, K::kSharedBytes);
          }));
        }
      }
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
