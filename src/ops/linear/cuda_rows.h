// y = f(x W^T + bias + residual) for some hundred tokens, and dgrad likewise, b = 32 on Hopper: W is read once, x comes
// in boxes of 128 tokens, and all that a row of blocks needs is under way at once.
//   x [n, inputs]   w [blocks, 32, 32]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      as many thread blocks as fit the card at once, several on every SM. A task is a row of blocks (or four
//             rows: see Group) and 128 tokens; each takes every so many, longest first
//   load      one warp fills a ring of stages, each a box of x and the block of W that meets it, with a note of what to
//             do. Tables and W come before x is waited for, so they cost nothing behind a kernel that lets this one
//             begin early
//   compute   wgmma by one or two warpgroups: tokens are its rows, outputs its columns
//   finish    from registers, while the ring fills for the next task
// Rows are walked whole, also those that the tables cut: 128 tokens of a hub of 44 blocks take 440 KB to one SM.
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
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
  CUtensorMap x, w;
  DeviceWalk walk;
  int32_t tasks;
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
  static_assert(Group == 1 || (Group == 4 && !ByIn && Plain));
};

// ---- Device ---------------------------------------------------------------------------------------------------------

enum RowsFlag : int32_t { kRowsData = 1, kRowsShared = 2, kRowsLast = 4, kRowsExit = 8 };

template <class K>
struct RowsShared {
  uint64_t full[K::kStages], empty[K::kStages];
  int4 notes[K::kStages];  // flags, row of blocks, first token, -
};

// The list of a row of blocks.
struct RowsList {
  int first, last;
  __device__ int count() const { return last - first; }
};

template <class K>
struct RowsTask {
  int to, token;  // the first row of blocks, and the first token
  bool shared;    // one list serves the group
  RowsList lists[K::group];
};

// A warp. False: a later slice of a row, which is done with the first one, or no piece at all.
template <class K>
__device__ inline bool find_task(const RowsProduct& p, int index, RowsTask<K>& task) {
  const int item = index / p.slices;
  task.token = index % p.slices * kRowsTokens;
  task.shared = true;
  if constexpr (K::group == 1) {
    if (p.cut && item >= p.walk.counts[0]) return false;
    const Piece piece = p.walk.pieces[item];
    task.to = piece.to, task.lists[0] = {piece.first, piece.last};
    if (!p.cut || piece.slot < 0) return true;
    if (piece.first != p.walk.starts[piece.to]) return false;
    task.lists[0].last = p.walk.starts[piece.to + 1];
  } else {
    task.to = item;
#pragma unroll
    for (int g = 0; g < K::group; ++g) {
      const int row = item + g * p.groups;
      task.lists[g] = {p.walk.starts[row], p.walk.starts[row + 1]};
    }
#pragma unroll
    for (int g = 1; g < K::group; ++g) task.shared = task.shared && task.lists[g].count() == task.lists[0].count();
    bool same = true;
    for (int i = static_cast<int>(threadIdx.x) % 32; task.shared && i < task.lists[0].count(); i += 32) {
      const int from = p.walk.refs[task.lists[0].first + i].from;
#pragma unroll
      for (int g = 1; g < K::group; ++g) same = same && p.walk.refs[task.lists[g].first + i].from == from;
    }
    task.shared = task.shared && __all_sync(~0u, same);
  }
  return true;
}

// The warp that fills the ring.
template <class K>
class RowsFeeder {
 public:
  __device__ RowsFeeder(const RowsProduct& p, RowsShared<K>& shared, uint32_t ring)
      : p_(p), shared_(shared), ring_(ring) {}

  __device__ void run() {
    for (int index = static_cast<int>(blockIdx.x); index < p_.tasks; index += static_cast<int>(gridDim.x)) {
      if (!find_task(p_, index, task_)) continue;
#pragma unroll
      for (int walk = 0; walk < K::group; ++walk) {
        if (walk == 0 || !task_.shared) send_list(task_.lists[walk], task_.to + walk * p_.groups);
      }
    }
    if (!waited_) wait();
    take_stage();
    if (lane() == 0) leave_note(kRowsExit, 0), ptx::mbarrier_arrive(full());
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ uint32_t full() const { return shared_address(&shared_.full[stage_]); }
  __device__ uint32_t place() const { return ring_ + static_cast<uint32_t>(stage_ * K::kStageBytes); }
  __device__ BlockRef fetch(const RowsList& list, int i) const {
    const int at = list.first + i + lane();
    return at < list.last ? p_.walk.refs[at] : BlockRef{0, 0};
  }
  __device__ void wait() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    waited_ = true;
  }
  __device__ void take_stage() {
    if (lane() == 0) ptx::mbarrier_wait(shared_address(&shared_.empty[stage_]), phase_ ^ 1);
    __syncwarp();
  }
  __device__ void next_stage() {
    if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
  }
  __device__ void leave_note(int flags, int to) {
    ptx::st_shared_16(shared_address(&shared_.notes[stage_]), int4{flags, to, task_.token, 0});
  }

  __device__ void send_list(const RowsList& list, int to) {
    BlockRef batch = fetch(list, 0), ahead{0, 0};
    int sent = 0;
    if (!waited_) {  // the ring is empty: W first, and x when it is there
      sent = min(list.count(), K::kStages);
      for (int i = 0; i < sent; ++i) load_w(batch, list, to, i), next_stage();
      wait();
      stage_ = 0, phase_ = 0;
      for (int i = 0; i < sent; ++i) load_x(batch, i), next_stage();
    }
    if (list.count() == 0) {
      take_stage();
      if (lane() == 0) leave_note(kRowsLast, to), ptx::mbarrier_arrive(full());
      next_stage();
    }
    for (int i = sent; i < list.count(); ++i) {
      if (i % 32 == 0 && i > 0) batch = ahead;
      if (i % 32 == 0 || i == sent) ahead = fetch(list, i / 32 * 32 + 32);
      take_stage();
      load_w(batch, list, to, i);
      load_x(batch, i);
      next_stage();
    }
  }
  // With the note, and the bytes that the stage waits for.
  __device__ void load_w(const BlockRef& batch, const RowsList& list, int to, int i) {
    const int weight = __shfl_sync(~0u, batch.weight, i % 32);
    if (lane() != 0) return;
    const bool all = K::group > 1 && task_.shared;
    leave_note(kRowsData | (all ? kRowsShared : 0) | (i + 1 == list.count() ? kRowsLast : 0), to);
    const uint32_t barrier = full(), w = place() + K::kXBytes;
    ptx::mbarrier_arrive_expect(barrier, static_cast<uint32_t>(K::kXBytes + (all ? K::group : 1) * K::kWBytes));
    ptx::load_box(w, &p_.w, barrier, 0, weight * kRowsBlock);
#pragma unroll
    for (int g = 1; g < K::group; ++g) {  // by_out, so W lies in the order of the lists
      if (!all) break;
      const int other = weight + task_.lists[g].first - list.first;
      ptx::load_box(w + static_cast<uint32_t>(g * K::kWBytes), &p_.w, barrier, 0, other * kRowsBlock);
    }
  }
  __device__ void load_x(const BlockRef& batch, int i) const {
    const int from = __shfl_sync(~0u, batch.from, i % 32);
    if (lane() == 0) ptx::load_box(place(), &p_.x, full(), from * kRowsBlock, task_.token);
  }

  const RowsProduct& p_;
  RowsShared<K>& shared_;
  RowsTask<K> task_;
  uint32_t ring_;
  bool waited_ = false;
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

// Words of four lanes beside each other change places: lane t gets word t of each, in the order of lanes.
__device__ inline void turn_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = step == 2 ? i : 2 * i, high = low + step;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], step);
      if (upper) words[low] = got;
      else words[high] = got;
    }
  }
}

// Of `Count` rows of blocks, p.groups apart; a lane stores 8 outputs of a token.
template <class K, int Count>
__device__ inline void store_vectors(const RowsProduct& p, int to, int first_token, const RowsSums<K, Count>& sums) {
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
      turn_quad(words);
      const int token = first_token + half * 64 + thread / 32 * 16 + row * 8 + lane / 4;
      const int64_t output = int64_t{to + g * p.groups} * kRowsBlock + lane % 4 * 8;
      if (token < p.n && output < p.outputs) {
        *reinterpret_cast<uint4*>(p.finish.at<typename K::Element>(token, output)) = {words[0], words[1], words[2],
                                                                                      words[3]};
      }
    }
  }
}

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

// A warpgroup that multiplies.
template <class K>
class RowsConsumer {
 public:
  __device__ RowsConsumer(const RowsProduct& p, RowsShared<K>& shared, uint32_t ring, int warpgroup)
      : p_(p), shared_(shared), ring_(ring), warpgroup_(warpgroup) {}

  __device__ void run() {
    while (true) {
      const int flags = look();
      if ((flags & kRowsExit) != 0) return;
      if (K::group == 1 || (flags & kRowsShared) == 0) walk<1>();
      else walk<K::group>();
    }
  }

 private:
  // The flags of the stage, as wgmma's conditions want them: the same in all lanes.
  __device__ int look() {
    ptx::mbarrier_wait(shared_address(&shared_.full[stage_]), phase_);
    note_ = ptx::ld_shared_16(shared_address(&shared_.notes[stage_]));
    return __shfl_sync(~0u, note_.x, 0);
  }
  // A list. The other thread blocks of the SM multiply while this one waits for its products.
  template <int Count>
  __device__ void walk() {
    RowsSums<K, Count> sums{};
    int flags;
    do {
      flags = look();
      if ((flags & kRowsData) != 0) {
        multiply_stage<K, Count>(ring_ + static_cast<uint32_t>(stage_ * K::kStageBytes), warpgroup_, sums);
        ptx::wgmma_wait<0>();
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared_address(&shared_.empty[stage_]));
      if (++stage_ == K::kStages) stage_ = 0, phase_ ^= 1;
    } while ((flags & kRowsLast) == 0);
    const int token = note_.z + warpgroup_ * K::kHalves * 64;
    if constexpr (K::plain) store_vectors<K, Count>(p_, note_.y, token, sums);
    else store_elements<K>(p_, note_.y, token, sums);
  }

  const RowsProduct& p_;
  RowsShared<K>& shared_;
  uint32_t ring_;
  int warpgroup_, stage_ = 0;
  uint32_t phase_ = 0;
  int4 note_{0, 0, 0, 0};
};

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
  __syncthreads();
  if (warpgroup == K::kConsumers) return RowsFeeder<K>(p, shared, ring).run();
  ptx::griddepcontrol_wait();  // y, and what the last step reads
  RowsConsumer<K>(p, shared, ring, warpgroup).run();
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

inline Status make_rows_maps(const Product& p, RowsProduct& args) {
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
  return {};
}

template <class T>
Status launch_rows(const Product& p, const CudaCall& call) {
  const bool plain = is_plain(p), fours = plain && rows_in_fours(call.problem);
  const int64_t slices = (p.x.n + kRowsTokens - 1) / kRowsTokens, rows = call.problem.output_blocks();
  const int64_t tasks = (fours ? rows / 4 : rows + call.problem.slots) * slices;
  RowsProduct args{.x = {},
                   .w = {},
                   .walk = walk_on_device(p.layout, p.by_in),
                   .tasks = static_cast<int32_t>(tasks),
                   .slices = static_cast<int32_t>(slices),
                   .groups = static_cast<int32_t>(rows / 4),
                   .cut = call.problem.slots > 0,
                   .early = p.x_is_last,
                   .n = static_cast<int32_t>(p.x.n),
                   .outputs = p.y.features,
                   .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(make_rows_maps(p, args));
  return with_rows_kernel<T>(p.by_in, fours, plain, [&]<class K>() {
    return cuda::launch({.blocks = std::min<int64_t>(tasks, int64_t{call.card.multiprocessors} * K::kResident),
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
