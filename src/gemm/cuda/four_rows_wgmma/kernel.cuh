// y = x W^T for some hundred tokens on Hopper, b = 32, where W has four times as many outputs as inputs, as the gates
// of an LSTM have. The rows of blocks r, r + rows / 4, ... are walked together and share x if their lists are equal.
//   x [n, inputs]   w [blocks, 32, 32]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      two thread blocks an SM. A job is four rows of blocks and 128 tokens. A thread block takes one after the
//             other
//   load      one warp fills a ring of stages. A stage is a box of x, the blocks of W that meet it, and a note of what
//             to do. Tables and W are read before x is waited for: they cost nothing after a kernel that lets this one
//             begin early
//   compute   wgmma by two warpgroups: tokens are its rows, outputs its columns
//   finish    from registers, while the ring fills for the next job
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/four_rows_wgmma/feed.cuh"
#include "gemm/cuda/wgmma/maps.cuh"

namespace blocksparse::gemm::four_rows_wgmma {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

template <class K, int Count>
using Sums = float[Count * K::kSums];

// Multiplies one stage, whose `Count` blocks of W lie one below the other.
template <class K, int Count>
__device__ inline void multiply_stage(uint32_t stage, int warpgroup, Sums<K, Count>& sums) {
  constexpr int kHalf = 64 * kBlock * 2 / 16;  // 64 tokens of x, in the descriptor's units of 16 bytes
  const uint64_t x =
      ptx::wgmma_matrix(stage, 0, 512, ptx::Swizzle::bytes_64) + static_cast<uint64_t>(warpgroup * kHalf);
  const uint64_t w = ptx::wgmma_matrix(stage + K::kXBytes, 0, 512, ptx::Swizzle::bytes_64);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlock / 16; ++k) {
    ptx::wgmma<typename K::Element, Count * kBlock, false, false>(sums, x + k * 2, w + k * 2);
  }
  ptx::wgmma_commit();
}

// Stores the sums of `Count` rows of blocks, p.groups apart. A lane stores 8 outputs of a token.
template <class K, int Count>
__device__ inline void store_vectors(const Args& p, int to, int first_token, const Sums<K, Count>& sums) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
#pragma unroll
  for (int part = 0; part < 2 * Count; ++part) {
    const int row = part % 2, g = part / 2;  // row: which 8 of a warp's 16 tokens; g: row of blocks
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* sum = sums + g * K::kSums + 4 * j + 2 * row;
      words[j] = narrow_pair(sum[0], sum[1], typename K::Element{});
    }
    cuda::turn_quad(words);
    const int token = first_token + thread / 32 * 16 + row * 8 + lane / 4;
    const int64_t output = int64_t{to + g * p.groups} * kBlock + lane % 4 * 8;
    if (token < p.n && output < p.outputs) {
      *reinterpret_cast<uint4*>(p.finish.at<typename K::Element>(token, output)) = {words[0], words[1], words[2],
                                                                                    words[3]};
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
      if ((flags & kShared) == 0) walk<1>();
      else walk<kGroup>();
    }
  }

 private:
  // The flags of the stage, shuffled: wgmma's conditions must be equal in all lanes.
  __device__ int look() {
    shared_.ring.wait_full(place_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.notes[place_.stage]));
    return __shfl_sync(~0u, note_.x, 0);
  }
  // Multiplies a list. The other thread block of the SM multiplies while this one waits for its products.
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
    store_vectors<K, Count>(p_, note_.y, note_.z + warpgroup_ * 64, sums);
  }

  const Args& p_;
  Shared<K>& shared_;
  uint32_t stages_;
  int warpgroup_;
  cuda::RingPlace place_;
  int4 note_{0, 0, 0, 0};
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    four_rows_wgmma_product([[maybe_unused]] const __grid_constant__ Args p) {
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
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == K::kConsumers) {
    Feeder<K>(p, shared, stages).run();
    return;
  }
  ptx::griddepcontrol_wait();  // y and what the epilogue reads
  Consumer<K>(p, shared, stages, warpgroup).run();
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

inline Status make_maps(const Product& p, Args& args) {
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = kBlock,
                                            .box_rows = kTokens},
                                           args.x));
  if (p.layout.blocks > 0) {  // an empty map is refused, and not needed
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

// Products with an epilogue or with unaligned y are left to row_wgmma.
template <class T>
FamilyKernels other_kernels() {
  return row_wgmma::kernels<std::is_same_v<T, Bf16> ? DType::bf16 : DType::f16>();
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  if (!wgmma::is_plain(p)) return other_kernels<T>().product(p, call);
  const int64_t slices = ceil_div(p.x.n, kTokens), rows = call.problem.output_blocks(), jobs = rows / kGroup * slices;
  Args args{.x = {},
            .w = {},
            .walk = walk_on_device(p.layout, p.by_in),
            .jobs = static_cast<int32_t>(jobs),
            .slices = static_cast<int32_t>(slices),
            .groups = static_cast<int32_t>(rows / kGroup),
            .early = p.x_is_last,
            .n = static_cast<int32_t>(p.x.n),
            .outputs = p.y.features,
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(make_maps(p, args));
  using K = Kernel<T>;
  return cuda::launch({.blocks = std::min(jobs, int64_t{call.card.multiprocessors} * K::kResident),
                       .threads = K::kThreads,
                       .shared_bytes = K::kSharedBytes,
                       .stream = stream_of(call),
                       .overlap = true},
                      four_rows_wgmma_product<K>, args);
}

template <class T>
Status prepare() {
  BS_RETURN_IF_ERROR(other_kernels<T>().prepare());
  BS_RETURN_IF_ERROR(cuda::prepare_for_many(four_rows_wgmma_product<Kernel<T>>, Kernel<T>::kSharedBytes));
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::four_rows_wgmma
