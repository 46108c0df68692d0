// y = f(x W^T + bias + residual) for many tokens and b = 8, 16 and 32, and dgrad likewise, on Hopper: x streams past
// warps that each keep a row of blocks of y.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      a thread block an SM, which takes tile after tile of 128 tokens x 256 outputs
//   load      one warp fills a ring of chunks of x, 128 tokens x 128 inputs, all of them in turn
//   compute   a warp has 128 tokens x a row of blocks (b = 8: two rows) and walks the row's list. W comes by cp.async
//             through a ring of the warp's own, x out of the thread block's ring. Sums never move, the only branches
//             are those of the list, and no kernel makes tables or copies of W before
//   finish    straight from registers, while other warps multiply
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/stream_x/finish.cuh"

namespace blocksparse::gemm::stream_x {
namespace {

struct Args {
  CUtensorMap x;
  DeviceWalk walk;
  const char* w;
  int32_t rows;  // rows of blocks
  int32_t inputs, n;
  int64_t outputs;
  int32_t out_tiles, token_tiles, chunks;
  bool longest_first;  // rows are in the order of pieces, none of which is a slice
  Finish finish;
};

// Tiles are dealt there and back: a thread block with long rows in one wave has short ones in the next.
struct Place {
  int wave = 0;

  __device__ int tile() const {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    return wave * blocks + (wave % 2 == 0 ? block : blocks - 1 - block);
  }
  __device__ bool is_tile(const Args& p) const { return tile() < p.out_tiles * p.token_tiles; }
  __device__ int first_token(const Args& p, int tokens) const { return tile() / p.out_tiles * tokens; }
};

// A warp's place in the ring of chunks. The barriers lie after the chunks and all of W. Not cuda/ring.h, which computes
// addresses from the stage: this class steps from one address to the next. b = 16 takes 80 instructions a block instead
// of 85, and b = 8 spills nothing.
template <class K>
struct Ring {
  static constexpr uint32_t kStages = K::kStages, kStageBytes = K::kStageBytes;
  static constexpr uint32_t kBarriers = kStages * kStageBytes + kWeightBytes;
  uint32_t begin, data, full;
  uint32_t phase = 0;

  __device__ explicit Ring(uint32_t at) : begin(at), data(at), full(at + kBarriers) {}
  __device__ uint32_t empty() const { return full + kStages * 8; }
  __device__ uint32_t weights() const { return begin + kStages * kStageBytes; }
  __device__ void advance() {
    data += kStageBytes, full += 8;
    if (full == begin + kBarriers + kStages * 8) data = begin, full = begin + kBarriers, phase ^= 1;
  }
};

// Called by one lane.
template <class K>
__device__ inline void load_chunks(const Args& p, Ring<K> ring) {
  for (Place at; at.is_tile(p); ++at.wave) {
    const int token = at.first_token(p, K::kTokens);
    for (int input = 0; input < p.inputs; input += kInputs) {
      ptx::mbarrier_wait(ring.empty(), ring.phase ^ 1);
      const bool both = input + 64 < p.inputs;
      ptx::mbarrier_arrive_expect(ring.full, both ? ring.kStageBytes : ring.kStageBytes / 2);
      ptx::load_box(ring.data, &p.x, ring.full, input, token);
      if (both) ptx::load_box(ring.data + ring.kStageBytes / 2, &p.x, ring.full, input + 64, token);
      ring.advance();
    }
  }
}

// A warp's place in the list of a row, and the blocks of W that follow. Each lane knows one of the 32 entries around
// the place and one of the next 32. What the next step needs is prepared a step before; for b = 8 W is not.
template <class K>
struct List {
  static constexpr int kNone = 0x7fffffff;
  static constexpr unsigned kPortionBlocks = K::kPortionBytes / K::kBlockBytes;
  int next;  // input block of the next block; b = 8: lanes from 16 on know that of the block after it
  WeightFragments<K> w;

  __device__ void begin(const Args& p, const Copy<K>& copy, const Piece& piece, const BlockRef& entries,
                        uint32_t weights_at) {
    at_ = piece.first, last_ = piece.last, place_ = 0, weights_ = weights_at;
    here_ = entries, behind_ = entry(p, 32);
    source_ = p.w + copy.from;
    if (!K::by_in) source_ += int64_t{at_ + static_cast<int>(lane_block())} * K::kBlockBytes;
    __syncwarp();  // before copies to where other lanes may still read
#pragma unroll
    for (unsigned k = 0; k < K::kRing; ++k) fetch(copy, k);
    look_up();
  }
  __device__ void advance(const Args& p, const Copy<K>& copy, unsigned blocks) {
    const unsigned portion = place_ / kPortionBlocks;
    at_ += static_cast<int>(blocks), place_ += blocks;
    __syncwarp();  // what is fetched now may lie where another lane has just read
    if (place_ / kPortionBlocks != portion) fetch(copy, K::kRing - 1);  // to where the portion before lay
    if (place_ >= 32) {
      place_ -= 32;
      here_ = behind_, behind_ = entry(p, 32 - static_cast<int>(place_));
    }
    look_up();
    if (K::kAhead) load();
  }
  // Loads W of the next block; b = 8: of the next two, which may be in two portions. Later copies that may still be
  // under way are those of the ring's other portions, without the one or two that are read. Copies of another list only
  // make it wait for more.
  __device__ void load() {
    ptx::cp_async_wait<K::block == 8 ? K::kRing - 2 : K::kRing - 1>();
    __syncwarp();
    if constexpr (K::block == 8) w.load_two(block(0), block(1));
    else w.load(block(0));
  }

 private:
  int at_, last_;       // the next block and the end of the list
  unsigned place_;      // place of the next block among 32, which are whole laps of the ring
  uint32_t weights_;    // the row's ring
  const char* source_;  // of this lane: its part of the portion to fetch next; by_in: of block 0
  BlockRef here_, behind_;

  __device__ static unsigned lane_block() { return kPortionBlocks == 1 ? 0 : static_cast<unsigned>(lane_id()) / 8; }
  __device__ uint32_t block(unsigned ahead) const {
    return weights_ + (place_ + ahead) * K::kBlockBytes % K::kRingBytes;
  }
  __device__ BlockRef entry(const Args& p, int ahead) const {
    const int mine = at_ + ahead + lane_id();
    return mine < last_ ? p.walk.refs[mine] : BlockRef{kNone, 0};
  }
  // Starts the copy of the portion `ahead` portions after that of the next block.
  __device__ void fetch(const Copy<K>& copy, unsigned ahead) {
    const unsigned mine = ahead * kPortionBlocks + lane_block() - place_ % kPortionBlocks;  // counted from the next
                                                                                            // block
    const char* from = source_;
    if constexpr (K::by_in) {
      // The lane that is asked decides itself which entry it gives. It decides rightly: portions do not reach past the
      // 32nd.
      const int weight = __shfl_sync(~0u, place_ + mine < 32 ? here_.weight : behind_.weight, (place_ + mine) % 32);
      from += int64_t{weight} * K::kBlockBytes;
    } else {
      source_ += K::kPortionBytes;
    }
    const unsigned portion = place_ / kPortionBlocks + ahead;
    if (at_ + static_cast<int>(mine) < last_) copy.start(weights_ + portion * K::kPortionBytes % K::kRingBytes, from);
    ptx::cp_async_commit();
  }
  __device__ void look_up() {
    if constexpr (K::block == 8) {
      const bool wraps = place_ == 31 && lane_id() == 0;
      next = __shfl_sync(~0u, wraps ? behind_.from : here_.from, (place_ + static_cast<unsigned>(lane_id()) / 16) % 32);
    } else {
      next = __shfl_sync(~0u, here_.from, static_cast<int>(place_));
    }
  }
};

// Multiplies all blocks of a row in the chunk that ends before input block `end`.
template <class K>
__device__ inline void multiply_chunk(const Args& p, const Copy<K>& copy, List<K>& list, int end, uint32_t stage,
                                      uint32_t lane, Sums<K>& sums) {
  if constexpr (K::block == 8) {
    while (const unsigned inside = __ballot_sync(~0u, list.next < end)) {
      if (!K::kAhead) list.load();
      const WeightFragments<K> w = list.w.operands();
      const bool two = inside == ~0u;
      const int from = two ? list.next : __shfl_sync(~0u, list.next, 0);
      list.advance(p, copy, two ? 2 : 1);
      const uint32_t x = x_address<K>(stage, lane, from);
      if (two) multiply_pair<K>(sums, x, w);
      else multiply_single<K>(sums, x + static_cast<uint32_t>(lane_id() / 16 * 16 * 128), w);
    }
  } else {
    while (list.next < end) {
      const WeightFragments<K> w = list.w.operands();
      const uint32_t x = x_address<K>(stage, lane, list.next);
      list.advance(p, copy, 1);
      multiply_block<K>(sums, x, w);
    }
  }
}

// The rows of blocks of a warp in a tile; rows beyond the last are empty. The place of the next tile's lists and their
// first entries are read while this tile is multiplied; for b = 8 after it.
template <class K>
struct Rows {
  Piece pieces[K::kRows];
  BlockRef entries[K::kRows];

  __device__ void read_pieces(const Args& p, const Place& at) {
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) pieces[r] = piece_of(p, at, r);
  }
  __device__ void read_entries(const Args& p) {
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) {
      const int mine = pieces[r].first + lane_id();
      entries[r] = mine < pieces[r].last ? p.walk.refs[mine] : BlockRef{List<K>::kNone, 0};
    }
  }
  __device__ void begin(const Args& p, const Copy<K>& copy, uint32_t weights, List<K> (&lists)[K::kRows]) const {
    const auto first = static_cast<uint32_t>(threadIdx.x / 32 * K::kRows);
#pragma unroll
    for (uint32_t r = 0; r < K::kRows; ++r) {
      lists[r].begin(p, copy, pieces[r], entries[r], weights + (first + r) * K::kRingBytes);
    }
  }

 private:
  __device__ static Piece piece_of(const Args& p, const Place& at, int r) {
    const int row = (at.tile() % p.out_tiles * K::kWarps + static_cast<int>(threadIdx.x) / 32) * K::kRows + r;
    if (!at.is_tile(p) || row >= p.rows) return {p.rows, 0, 0, 0};
    if (p.longest_first) return p.walk.pieces[row];
    return {row, p.walk.starts[row], p.walk.starts[row + 1], 0};
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

template <class K>
__device__ inline void multiply_tiles(const Args& p, Ring<K> ring) {
  const uint32_t weights = ring.weights();
  const uint32_t lane = lane_of<K>();
  const Copy<K> copy = Copy<K>::of_lane();
  Rows<K> rows;
  List<K> lists[K::kRows];
  Place at;
  rows.read_pieces(p, at);
  rows.read_entries(p);
  rows.begin(p, copy, weights, lists);
  while (at.is_tile(p)) {
    const int token = at.first_token(p, K::kTokens);
    int32_t to[K::kRows];
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) {
      to[r] = rows.pieces[r].to;
      if (K::kAhead) lists[r].load();
    }
    Sums<K> sums[K::kRows] = {};
    const auto corner = [&](int r) { return Corner<K>(p.n, p.outputs, token, to[r]); };
    if constexpr (K::residual) {
#pragma unroll
      for (int r = 0; r < K::kRows; ++r) begin_with<K>(p.finish.residual, corner(r), sums[r]);
    }
    ++at.wave;
    if (K::kAhead) rows.read_pieces(p, at);
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      ptx::mbarrier_wait(ring.full, ring.phase);
#pragma unroll
      for (int r = 0; r < K::kRows; ++r) {
        multiply_chunk<K>(p, copy, lists[r], (chunk + 1) * K::kBlocks, ring.data, lane, sums[r]);
      }
      __syncwarp();
      if (lane_id() == 0) ptx::mbarrier_arrive(ring.empty());
      ring.advance();
      if (K::kAhead && chunk == 0) rows.read_entries(p);
    }
    if (!K::kAhead) {
      rows.read_pieces(p, at);
      rows.read_entries(p);
    }
    rows.begin(p, copy, weights, lists);  // W of the next tile arrives during the stores
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) {
      finish_row<K>(p.finish, corner(r), int64_t{to[r]} * K::block, p.outputs, sums[r]);
    }
  }
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) stream_x_product([[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  const Ring<K> ring(ptx::held(ptx::shared_address(staged)));
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.x);
    for (uint32_t s = 0; s < ring.kStages; ++s) {
      ptx::mbarrier_init(ring.full + 8 * s, 1);
      ptx::mbarrier_init(ring.empty() + 8 * s, K::kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x >= K::kWarps * 32) {
    ptx::setmaxnreg_dec<K::kFeedRegisters>();
    if (threadIdx.x == K::kWarps * 32) load_chunks(p, ring);
  } else {
    ptx::setmaxnreg_inc<K::kRegisters>();
    multiply_tiles<K>(p, ring);
  }
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int32_t block, bool by_in, bool residual, int32_t tokens, Body body) {
  const auto with = [&]<int B, int Tokens>() {
    if (residual) {
      return by_in ? body.template operator()<Kernel<T, B, true, true, Tokens>>()
                   : body.template operator()<Kernel<T, B, false, true, Tokens>>();
    }
    return by_in ? body.template operator()<Kernel<T, B, true, false, Tokens>>()
                 : body.template operator()<Kernel<T, B, false, false, Tokens>>();
  };
  switch (block) {
    case 8: return with.template operator()<8, 128>();
    case 16: return with.template operator()<16, 128>();
    default: return tokens == 64 ? with.template operator()<32, 64>() : with.template operator()<32, 128>();
  }
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const CudaProblem& problem = call.problem;
  const int32_t tokens = tokens_of_tile(problem, call.card);
  Args args{.x = {},
            .walk = walk_on_device(p.layout, p.by_in),
            .w = static_cast<const char*>(p.w),
            .rows = static_cast<int32_t>(problem.output_blocks()),
            .inputs = static_cast<int32_t>(problem.inputs),
            .n = static_cast<int32_t>(p.x.n),
            .outputs = problem.outputs,
            .out_tiles = static_cast<int32_t>(ceil_div(problem.outputs, kOutputs)),
            .token_tiles = static_cast<int32_t>(ceil_div(p.x.n, tokens)),
            .chunks = static_cast<int32_t>(ceil_div(problem.inputs, kInputs)),
            .longest_first = problem.slots == 0,
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = 64,
                                            .box_rows = static_cast<uint32_t>(tokens)},
                                           args.x));
  return with_kernel<T>(p.layout.block_size, p.by_in, p.residual.data != nullptr, tokens, [&]<class K>() {
    return cuda::launch(
        {.blocks = std::min<int64_t>(call.card.multiprocessors, int64_t{args.out_tiles} * args.token_tiles),
         .threads = K::kThreads,
         .shared_bytes = K::kSharedBytes,
         .stream = stream_of(call),
         .overlap = true},
        stream_x_product<K>, args);
  });
}

template <class T>
Status prepare() {
  for (int32_t block : {8, 16, 32}) {
    for (bool by_in : {false, true}) {
      for (bool residual : {false, true}) {
        for (int32_t tokens : {64, 128}) {
          BS_RETURN_IF_ERROR(with_kernel<T>(block, by_in, residual, tokens, [&]<class K>() {
            return cuda::prepare(stream_x_product<K>, K::kSharedBytes);
          }));
        }
      }
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::stream_x
