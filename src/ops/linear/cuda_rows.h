// y = f(x W^T + bias + residual) for some hundred tokens, and dgrad likewise, b = 32 on Hopper: W is read once, x comes
// in boxes of 128 tokens, and all that a row of blocks needs is under way at once.
//   x [n, inputs]   w [blocks, 32, 32]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      a thread block for each row of blocks (or four rows: see Group) and 128 tokens, several on every SM
//   load      one warp fills a ring of stages, each a box of x and the block of W that meets it. Tables and W come
//             before x is waited for, so they cost nothing behind a kernel that lets this one begin early
//   compute   wgmma by one or two warpgroups: tokens are its rows, outputs its columns
//   finish    through shared memory in boxes, or element by element where there is more to do
// Rows are walked whole, also those that the tables cut: 128 tokens of a hub of 44 blocks take 440 KB to one SM.
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "ops/linear/cuda_finish.h"
#include "ops/linear/cuda_many_maps.h"

namespace blocksparse::linear {
namespace {

using ptx::shared_address;

// ---- Config ---------------------------------------------------------------------------------------------------------

inline constexpr int kRowsBlock = 32, kRowsTokens = 128;

struct RowsProduct {
  CUtensorMap x, w, y;
  DeviceWalk walk;
  int32_t slices;  // of tokens
  int32_t groups;  // where four rows are walked together: how many fours
  bool cut;        // some rows are several pieces
  bool early;      // what the kernel in front has not written may be read before it is complete
  int32_t n;
  int64_t outputs;
  Finish finish;
};

// Group 4: the rows r, r + groups, ... of W are walked together, as the gates of an LSTM lie. Where their lists are the
// same, they share x.
template <class T, bool ByIn, int Group, bool Plain>
struct Rows {
  using Element = T;
  static constexpr bool by_in = ByIn, plain = Plain;
  static constexpr int group = Group;
  static constexpr int kXBytes = kRowsTokens * kRowsBlock * 2, kWBytes = kRowsBlock * kRowsBlock * 2;
  static constexpr int kStageBytes = kXBytes + Group * kWBytes;
  // Three thread blocks an SM, or two, and room for the kernels in front and behind.
  static constexpr int kStages = Group == 1 ? 7 : 6, kResident = Group == 1 ? 3 : 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kConsumers = Group == 1 ? 1 : 2;  // warpgroups
  static constexpr int kHalves = 2 / kConsumers;         // of 64 tokens, of a warpgroup
  static constexpr int kSums = kRowsBlock / 2;           // of a lane, for each half and row of blocks
  static constexpr int kThreads = 128 * kConsumers + 32;
  static_assert(kRowsTokens * kRowsBlock * 2 * Group <= kSharedBytes && (Group == 1 || (Group == 4 && !ByIn && Plain)));
};

template <class K>
struct RowsShared {
  uint64_t full[K::kStages], empty[K::kStages];
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// The list of a row of blocks.
struct RowsList {
  int first, last;
  __device__ int count() const { return last - first; }
};

template <class K>
struct RowsTask {
  int to;       // row of blocks, the first of the group
  int token;    // the first
  bool shared;  // one list serves the group
  RowsList lists[K::group];
};

// All threads. False: a later slice of a row, which the first one's thread block does, or no piece at all.
template <class K>
__device__ inline bool find_task(const RowsProduct& p, RowsTask<K>& task) {
  const int item = static_cast<int>(blockIdx.x) / p.slices;
  task.token = static_cast<int>(blockIdx.x) % p.slices * kRowsTokens;
  task.shared = true;
  if constexpr (K::group == 1) {
    if (p.cut && item >= p.walk.counts[0]) return false;
    const Piece piece = p.walk.pieces[item];
    task.to = piece.to, task.lists[0] = {piece.first, piece.last};
    if (piece.slot < 0) return true;
    if (piece.first != p.walk.starts[piece.to]) return false;
    task.lists[0].last = p.walk.starts[piece.to + 1];
  } else {
    task.to = item;
#pragma unroll
    for (int g = 0; g < K::group; ++g) {
      const int row = item + g * p.groups;
      task.lists[g] = {p.walk.starts[row], p.walk.starts[row + 1]};
    }
    bool same = true;
#pragma unroll
    for (int g = 1; g < K::group; ++g) same = same && task.lists[g].count() == task.lists[0].count();
    for (int i = static_cast<int>(threadIdx.x); same && i < task.lists[0].count(); i += K::kThreads) {
      const int from = p.walk.refs[task.lists[0].first + i].from;
#pragma unroll
      for (int g = 1; g < K::group; ++g) same = same && p.walk.refs[task.lists[g].first + i].from == from;
    }
    task.shared = __syncthreads_and(same) != 0;
  }
  return true;
}

// The warp that fills the ring. Stages are numbered through all walks of the task.
template <class K>
class RowsFeeder {
 public:
  __device__ RowsFeeder(const RowsProduct& p, const RowsTask<K>& task, RowsShared<K>& shared, uint32_t ring)
      : p_(p), task_(task), shared_(shared), ring_(ring) {}

  __device__ void run() {
#pragma unroll
    for (int walk = 0; walk < K::group; ++walk) {
      if (walk > 0 && task_.shared) break;
      const RowsList list = task_.lists[walk];
      BlockRef batch = fetch(list, 0);
      // Only the first walk begins with an empty ring.
      const int early = walk == 0 ? min(list.count(), K::kStages) : 0;
      for (int i = 0; i < early; ++i) begin(batch, list, i);
      if (walk == 0) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
      }
      for (int i = 0; i < early; ++i) load_x(batch, i, i);
      for (int i = early; i < list.count(); ++i) {
        if (i % 32 == 0 && i > 0) batch = next_;
        if (i % 32 == 0 || i == early) next_ = fetch(list, i / 32 * 32 + 32);
        if (lane() == 0) ptx::mbarrier_wait(shared_address(&shared_.empty[stage_]), phase_ ^ 1);
        __syncwarp();
        const int stage = stage_;
        begin(batch, list, i);
        load_x(batch, i, stage);
      }
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ BlockRef fetch(const RowsList& list, int i) const {
    const int at = list.first + i + lane();
    return at < list.last ? p_.walk.refs[at] : BlockRef{0, 0};
  }
  // Expects a stage's bytes and loads its blocks of W; then the next stage is up.
  __device__ void begin(const BlockRef& batch, const RowsList& list, int i) {
    const int weight = __shfl_sync(~0u, batch.weight, i % 32);
    if (lane() == 0) {
      const uint32_t full = shared_address(&shared_.full[stage_]);
      const uint32_t w = ring_ + static_cast<uint32_t>(stage_ * K::kStageBytes + K::kXBytes);
      const int blocks = task_.shared ? K::group : 1;
      ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(K::kXBytes + blocks * K::kWBytes));
      ptx::load_box(w, &p_.w, full, 0, weight * kRowsBlock);
#pragma unroll
      for (int g = 1; g < K::group; ++g) {  // by_out, so W lies in the order of the lists
        if (!task_.shared) break;
        const int other = weight + task_.lists[g].first - list.first;
        ptx::load_box(w + static_cast<uint32_t>(g * K::kWBytes), &p_.w, full, 0, other * kRowsBlock);
      }
    }
    if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
  }
  __device__ void load_x(const BlockRef& batch, int i, int stage) const {
    const int from = __shfl_sync(~0u, batch.from, i % 32);
    if (lane() != 0) return;
    ptx::load_box(ring_ + static_cast<uint32_t>(stage * K::kStageBytes), &p_.x, shared_address(&shared_.full[stage]),
                  from * kRowsBlock, task_.token);
  }

  const RowsProduct& p_;
  const RowsTask<K>& task_;
  RowsShared<K>& shared_;
  uint32_t ring_;
  BlockRef next_{0, 0};
  int stage_ = 0;
  uint32_t phase_ = 0;
};

template <class K, int Count>
using RowsSums = float[K::kHalves][Count * K::kSums];

// One stage, whose `Count` blocks of W lie one below the other.
template <class K, int Count>
__device__ inline void multiply_stage(uint32_t stage, int warpgroup, RowsSums<K, Count>& sums) {
  constexpr int kHalf = 64 * kRowsBlock * 2 / 16;  // of x, in the descriptor's units of 16 bytes
  const uint64_t x =
      ptx::wgmma_matrix(stage, 0, 512, ptx::Swizzle::bytes_64) + static_cast<uint64_t>(warpgroup * K::kHalves * kHalf);
  const uint64_t w = ptx::wgmma_matrix(stage + K::kXBytes, 0, 512, ptx::Swizzle::bytes_64);
  ptx::wgmma_fence();
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int k = 0; k < kRowsBlock / 16; ++k) {
      ptx::wgmma<typename K::Element, Count * kRowsBlock, false, K::by_in>(sums[half], x + half * kHalf + k * 2,
                                                                           w + k * (K::by_in ? 64 : 2));
    }
  }
  ptx::wgmma_commit();
}

// What a warpgroup knows of the ring.
template <class K>
class RowsConsumer {
 public:
  __device__ RowsConsumer(RowsShared<K>& shared, uint32_t ring, int warpgroup)
      : shared_(shared), ring_(ring), warpgroup_(warpgroup) {}

  // The other thread blocks of the SM multiply while this one waits for its products.
  template <int Count>
  __device__ void walk(int count, RowsSums<K, Count>& sums) {
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(shared_address(&shared_.full[stage_]), phase_);
      multiply_stage<K, Count>(ring_ + static_cast<uint32_t>(stage_ * K::kStageBytes), warpgroup_, sums);
      ptx::wgmma_wait<0>();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared_address(&shared_.empty[stage_]));
      if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
    }
  }

 private:
  RowsShared<K>& shared_;
  uint32_t ring_;
  int warpgroup_, stage_ = 0;
  uint32_t phase_ = 0;
};

// Boxes of 64 tokens x 32 outputs, swizzled in 64 bytes, where the ring was: all warpgroups are through with it.
template <class K>
__device__ inline void store_boxes(const RowsProduct& p, const RowsTask<K>& task, uint32_t ring, int warpgroup,
                                   const RowsSums<K, K::group>& sums) {
  constexpr uint32_t kBoxBytes = 64 * kRowsBlock * 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, matrix = lane / 8;
  const int row = thread / 32 * 16 + matrix % 2 * 8 + lane % 8;
  const uint32_t boxes = ring + static_cast<uint32_t>(warpgroup * K::kHalves * K::group) * kBoxBytes;
  ptx::bar_sync(1, 128 * K::kConsumers);
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int v = 0; v < K::group * 4; v += 2) {  // 8 outputs
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sum = sums[half] + 4 * v + 2 * i;
        words[i] = narrow_pair(sum[0], sum[1], typename K::Element{});
      }
      const int vector = v % 4 + matrix / 2;
      const uint32_t box = boxes + static_cast<uint32_t>(half * K::group + v / 4) * kBoxBytes;
      ptx::stmatrix_x4(box + static_cast<uint32_t>(row * 64 + ((vector ^ (row / 2 % 4)) << 4)), words);
    }
  }
  ptx::fence_async_shared();
  ptx::bar_sync(2 + warpgroup, 128);
  if (thread != 0) return;
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
    const int token = task.token + (warpgroup * K::kHalves + half) * 64;
    if (token >= p.n) break;
#pragma unroll
    for (int g = 0; g < K::group; ++g) {
      ptx::store_box(&p.y, boxes + static_cast<uint32_t>(half * K::group + g) * kBoxBytes,
                     (task.to + g * p.groups) * kRowsBlock, token);
    }
  }
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
}

// Those of one row of blocks.
template <class K>
__device__ inline void store_elements(const RowsProduct& p, int to, int first_token, const RowsSums<K, 1>& sums) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < K::kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < K::kSums; ++i) {
      const int token = first_token + half * 64 + thread / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
      const int64_t output = int64_t{to} * kRowsBlock + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (token < p.n && output < p.outputs) p.finish.store<typename K::Element>(token, output, sums[half][i]);
    }
  }
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    rows_product([[maybe_unused]] const __grid_constant__ RowsProduct p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ RowsShared<K> shared;
  const uint32_t ring = shared_address(staged);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (!p.early) ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
    for (int s = 0; s < K::kStages; ++s) {
      ptx::mbarrier_init(shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(shared_address(&shared.empty[s]), K::kConsumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  RowsTask<K> task;
  if (!find_task(p, task)) return;
  __syncthreads();
  if (warpgroup == K::kConsumers) return RowsFeeder<K>(p, task, shared, ring).run();
  ptx::griddepcontrol_wait();  // y, and what the last step reads
  RowsConsumer<K> consumer(shared, ring, warpgroup);
  if (K::plain && task.shared) {
    RowsSums<K, K::group> sums{};
    consumer.template walk<K::group>(task.lists[0].count(), sums);
    return store_boxes<K>(p, task, ring, warpgroup, sums);
  }
#pragma unroll
  for (int g = 0; g < K::group; ++g) {
    RowsSums<K, 1> sums{};
    consumer.template walk<1>(task.lists[g].count(), sums);
    store_elements<K>(p, task.to + g * p.groups, task.token + warpgroup * K::kHalves * 64, sums);
  }
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_rows_kernel(bool by_in, bool fours, bool plain, Body body) {
  if (fours) return body.template operator()<Rows<T, false, 4, true>>();
  if (by_in) {
    return plain ? body.template operator()<Rows<T, true, 1, true>>()
                 : body.template operator()<Rows<T, true, 1, false>>();
  }
  return plain ? body.template operator()<Rows<T, false, 1, true>>()
               : body.template operator()<Rows<T, false, 1, false>>();
}

inline Status make_rows_maps(const Product& p, bool plain, RowsProduct& args) {
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = kRowsBlock,
                                            .box_rows = kRowsTokens},
                                           args.x));
  if (p.layout.blocks > 0) {  // a map of nothing is refused, and not needed
    BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.w,
                                              .columns = kRowsBlock,
                                              .rows = p.layout.blocks * kRowsBlock,
                                              .row_stride = kRowsBlock,
                                              .box_columns = kRowsBlock,
                                              .box_rows = kRowsBlock},
                                             args.w));
  }
  if (!plain) return {};
  return cuda::make_tensor_map({.data = p.y.data,
                                .columns = p.y.features,
                                .rows = p.y.n,
                                .row_stride = p.y.token_stride,
                                .box_columns = kRowsBlock,
                                .box_rows = 64},
                               args.y);
}

template <class T>
Status launch_rows(const Product& p, const CudaCall& call) {
  const bool plain = is_plain(p), fours = plain && rows_in_fours(call.problem);
  const int64_t slices = (p.x.n + kRowsTokens - 1) / kRowsTokens, rows = call.problem.output_blocks();
  RowsProduct args{.x = {},
                   .w = {},
                   .y = {},
                   .walk = walk_on_device(p.layout, p.by_in),
                   .slices = static_cast<int32_t>(slices),
                   .groups = static_cast<int32_t>(rows / 4),
                   .cut = call.problem.slots > 0,
                   .early = p.x_is_last,
                   .n = static_cast<int32_t>(p.x.n),
                   .outputs = p.y.features,
                   .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(make_rows_maps(p, plain, args));
  return with_rows_kernel<T>(p.by_in, fours, plain, [&]<class K>() {
    return cuda::launch({.blocks = (fours ? rows / 4 : rows + call.problem.slots) * slices,
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call),
                         .overlap = true},
                        rows_product<K>, args);
  });
}

template <class T>
Status prepare_rows() {
  for (bool by_in : {false, true}) {
    for (bool fours : {false, true}) {
      for (bool plain : {false, true}) {
        BS_RETURN_IF_ERROR(with_rows_kernel<T>(
            by_in, fours, plain, [&]<class K>() { return cuda::prepare_for_many(rows_product<K>, K::kSharedBytes); }));
      }
    }
  }
  return cuda::prepare_tensor_maps();
}

template <class T>
CudaProductKernel make_rows_product(DType dtype) {
  return {CudaKernel::rows, dtype, prepare_rows<T>, launch_rows<T>};
}

}  // namespace
}  // namespace blocksparse::linear
