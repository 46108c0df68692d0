// y = f(x W^T + bias + residual) for few tokens, and dgrad likewise: W is streamed straight into registers, once for up
// to 64 tokens.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, or f32 rounded to tf32; sums in f32
// Who does what
//   grid      a thread block for each piece, strip of up to 32 outputs and slice of up to 64 tokens; as many as
//             possible resident at once
//   warps     take the patches of a piece in turn, so that all thread blocks walk x in one order
//   load      W and x some patches ahead, into registers. W passes L1 by; x is read from L1 and L2, again by every
//   strip compute   mma.sync; no barrier and no shared memory in the loop finish    all threads add the sums of the
//   warps, in the order of warps; slices of split rows go to the workspace:
//             finish.cuh
// 12288 x 12288, density .1, n = 32, b = 32, H200, 2026-11-21: 11.4 us, of which W alone takes 8.3. Nothing is
// saturated: after 3 us of start and finish, W and x arrive at L2's rate. NOTES.md has the forms that lost against it.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/stream_w/finish.cuh"
#include "gemm/cuda/stream_w/pack.h"
#include "gemm/cuda/stream_w/patches.cuh"
#include "gemm/cuda/stream_w/tile_tf32.cuh"

namespace blocksparse::gemm::stream_w {
namespace {

// ---- Config ---------------------------------------------------------------------------------------------------------

struct Config {
  int w_ahead, x_ahead;  // patches that a warp has under way
  int resident_warps;    // warps of an SM, which fix the registers of a thread
};

// More warps are better than more patches ahead: 16 warps x 2 beat 12 x 3, and b = 8 with W 16 ahead takes 1.35x the
// time. Gated products need more registers, so they have fewer warps.
constexpr Config config_of(int block, int tokens, bool gated) {
  if (gated) {
    if (block == 8) return tokens <= 32 ? Config{4, 4, 20} : Config{4, 2, 20};
    if (block == 16) return tokens <= 32 ? Config{2, 2, 20} : Config{2, 1, 16};
    return tokens <= 32 ? Config{1, 1, 12} : Config{1, 1, 8};
  }
  if (block == 8) return tokens <= 32 ? Config{8, 8, 24} : Config{4, 4, 24};
  if (block == 16) return tokens <= 16 ? Config{4, 4, 28} : tokens <= 32 ? Config{2, 2, 28} : Config{2, 1, 24};
  return tokens <= 8 ? Config{4, 4, 16} : tokens <= 32 ? Config{2, 2, 16} : Config{1, 1, 12};
}

// tf32 has patches of twice as many words for b <= 16, and rounds operands while it multiplies, so fewer warps are
// better: b = 16, n = 64, density .1: 32.8 us with 12 warps, 41.4 with 16. NOTES.md has the other configurations.
constexpr Config config_of_tf32(int block, int tokens, bool gated) {
  if (gated) {
    if (block == 8) return tokens <= 32 ? Config{2, 2, 20} : Config{2, 2, 16};
    if (block == 16) return tokens <= 32 ? Config{2, 1, 16} : Config{1, 1, 12};
    return config_of(block, tokens, gated);
  }
  if (block == 8) return tokens <= 16 ? Config{4, 4, 24} : tokens <= 32 ? Config{2, 2, 28} : Config{4, 2, 16};
  if (block == 16) return tokens <= 16 ? Config{4, 2, 20} : tokens <= 32 ? Config{1, 1, 28} : Config{2, 1, 12};
  return tokens <= 8 ? Config{4, 4, 16} : tokens <= 32 ? Config{2, 2, 12} : Config{2, 1, 8};
}

template <class T, int Block, int Tokens, bool ByIn, bool Gated>
struct Kernel {
  using Element = T;
  using Tile = stream_w::Tile<T, Block, Tokens, ByIn>;
  static constexpr Config config =
      sizeof(T) == 4 ? config_of_tf32(Block, Tokens, Gated) : config_of(Block, Tokens, Gated);
  static constexpr int block = Block, tokens = Tokens;
  static constexpr bool by_in = ByIn, gated = Gated;
  static constexpr int most_threads = 32 * config.resident_warps;
  static constexpr int staged_row = Tile::kOutputs + Tile::kPad;
  static constexpr int shared_bytes(int warps) { return warps * tokens * staged_row * static_cast<int>(sizeof(float)); }
  static constexpr int most_shared_bytes = shared_bytes(block >= 32 ? 8 : 4);
  static_assert(config.w_ahead % config.x_ahead == 0 && config.w_ahead <= 32);
};

// ---- Device ---------------------------------------------------------------------------------------------------------

template <class K>
using Sums = float[K::Tile::kSums][4];

template <class K>
__device__ inline void add_patch(const uint32_t (&w)[K::Tile::kWordsW], const uint32_t (&x)[K::Tile::kWordsX],
                                 Sums<K>& sum, float gate) {
  if (K::gated && gate == 0) return;
  K::Tile::template multiply<K::gated>(w, x, sum, gate);
}

template <class K>
__device__ inline void add_patches(const Args& p, const typename K::Tile& tile, Patches<K> patches, Sums<K>& sum) {
  constexpr int kAheadW = K::config.w_ahead, kAheadX = K::config.x_ahead;
  const int count = patches.count();
  uint32_t w[kAheadW][K::Tile::kWordsW], x[kAheadX][K::Tile::kWordsX];
#pragma unroll
  for (int d = 0; d < kAheadW; ++d) {
    if (d < count) tile.load_w(w[d], patches.next_w(d));
  }
  if (p.early) ptx::griddepcontrol_wait();
#pragma unroll
  for (int d = 0; d < kAheadX; ++d) {
    if (d < count) tile.load_x(x[d], patches.next_x(d));
  }
  int i = 0;
  for (; i + 2 * kAheadW <= count; i += kAheadW) {
#pragma unroll
    for (int d = 0; d < kAheadW; ++d) {
      add_patch<K>(w[d], x[d % kAheadX], sum, patches.next_gate(i + d));
      tile.load_w(w[d], patches.next_w(i + d + kAheadW));
      tile.load_x(x[d % kAheadX], patches.next_x(i + d + kAheadX));
    }
  }
  for (; i < count; i += kAheadW) {
#pragma unroll
    for (int d = 0; d < kAheadW; ++d) {
      if (i + d >= count) continue;
      add_patch<K>(w[d], x[d % kAheadX], sum, patches.next_gate(i + d));
      if (i + d + kAheadW < count) tile.load_w(w[d], patches.next_w(i + d + kAheadW));
      if (i + d + kAheadX < count) tile.load_x(x[d % kAheadX], patches.next_x(i + d + kAheadX));
    }
  }
}

// Whether a piece ends with an incomplete block of inputs, beyond whose inputs W may hold anything. Lists are sorted,
// so such a block is the last of its piece.
__device__ inline bool ends_ragged(const Args& p, const Piece& piece) {
  return p.ragged != 0 && piece.first < piece.last && p.walk.refs[piece.last - 1].from == p.last_block;
}

template <class K>
__device__ inline void add_ragged_block(const Args& p, const typename K::Tile& tile, BlockRef ref, int strip,
                                        Sums<K>& sum) {
  using Tile = typename K::Tile;
  const float gate = K::gated ? p.gates[ref.weight] : 1;
#pragma unroll 1
  for (int patch = static_cast<int>(threadIdx.x) / 32; patch < Tile::kPatches; patch += p.warps) {
    uint32_t w[Tile::kWordsW], x[Tile::kWordsX];
    tile.load_w(w, Tile::w_offset(ref.weight, strip, patch));
    tile.load_x(x, Tile::x_offset(p, ref.from, patch));
    Tile::clear_w_beyond(w, p.ragged - patch * Tile::kDepth);
    add_patch<K>(w, x, sum, gate);
  }
}

template <class K>
__global__ void __launch_bounds__(K::most_threads, 1) stream_w_product(const __grid_constant__ Args p) {
  using Tile = typename K::Tile;
  extern __shared__ float4 shared[];
  if (!p.early) ptx::griddepcontrol_wait();
  const int of_slice = static_cast<int>(p.slices == 1 ? blockIdx.x : blockIdx.x / static_cast<uint32_t>(p.slices));
  const int item = of_slice / Tile::kStrips, strip = of_slice % Tile::kStrips;
  const Piece piece = p.walk.pieces[item];
  if (p.partial != nullptr && item >= p.walk.counts[0]) return;  // the grid has room for more pieces than there are
  const int blocks = piece.last - piece.first - ends_ragged(p, piece);
  const Tile tile(p);
  Sums<K> sum = {};
  add_patches<K>(p, tile, Patches<K>(p, piece, blocks, strip), sum);
  if (p.ragged != 0) {  // looked up again, so that the loop keeps no register for it
    const Piece again = p.walk.pieces[item];
    if (ends_ragged(p, again)) add_ragged_block<K>(p, tile, p.walk.refs[again.last - 1], strip, sum);
  }

  // The kernel that adds slices may begin. It waits for what is stored from here on.
  if (p.partial != nullptr) ptx::griddepcontrol_launch_dependents();
  auto* staged = reinterpret_cast<float*>(shared);  // [warps][tokens][staged_row]
  float* of_warp = staged + static_cast<int>(threadIdx.x) / 32 * K::tokens * K::staged_row;
#pragma unroll
  for (int j = 0; j < K::tokens / 8; ++j) Tile::stage(sum, j, of_warp + 8 * j * K::staged_row);
  __syncthreads();
  if constexpr (K::block == 8) finish<K, 2>(p, piece, strip, staged);
  else if (K::block == 16 || p.warps == 4) finish<K, 4>(p, piece, strip, staged);
  else finish<K, 8>(p, piece, strip, staged);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T, int Block, bool ByIn, class Body>
Status with_tokens(int32_t tokens, bool gated, Body body) {
  if (gated) {
    return tokens <= 32 ? body.template operator()<Kernel<T, Block, 32, ByIn, true>>()
                        : body.template operator()<Kernel<T, Block, 64, ByIn, true>>();
  }
  constexpr int kLeast = Block <= 16 ? 16 : 8;
  if (tokens <= kLeast) return body.template operator()<Kernel<T, Block, kLeast, ByIn, false>>();
  return tokens <= 32 ? body.template operator()<Kernel<T, Block, 32, ByIn, false>>()
                      : body.template operator()<Kernel<T, Block, 64, ByIn, false>>();
}

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int32_t block, int32_t tokens, bool by_in, bool gated, Body body) {
  const auto with_block = [&]<int Block>() {
    return by_in ? with_tokens<T, Block, true>(tokens, gated, body) : with_tokens<T, Block, false>(tokens, gated, body);
  };
  switch (block) {
    case 8: return with_block.template operator()<8>();
    case 16: return with_block.template operator()<16>();
    case 32: return with_block.template operator()<32>();
    case 64: return with_block.template operator()<64>();
    default: return with_block.template operator()<128>();
  }
}

// Whether rows of x can be read 16 bytes at a time.
template <class T>
inline bool vectors_of(const Activations& x) {
  return !x.features_first() && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         (x.n == 1 || x.token_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0);
}

// Sets where x is read: in place, or a copy in the workspace.
template <class T>
Status place_x(const Product& p, const CudaCall& call, const Plan& plan, bool overlap, Args& args) {
  const int32_t block = p.layout.block_size;
  constexpr int64_t kSize = sizeof(T);
  const int64_t token_bytes = p.x.n == 1 ? 0 : kSize * p.x.token_stride;
  const int64_t patch_vectors = std::min<int64_t>(kSize * block, 64) / 16;
  const bool vectors = vectors_of<T>(p.x);
  if (p.x.features == 0 || (!plan.pack && vectors && args.ragged == 0 && p.x.n * token_bytes <= UINT32_MAX)) {
    args.x = p.x.data;
    args.x_token_bytes = static_cast<uint32_t>(token_bytes);
    args.x_patch_vectors = static_cast<uint32_t>(patch_vectors);
    args.early = overlap && p.x_is_last;
    return {};
  }
  const Pack pack{.size = kSize,
                  .x = p.x.data,
                  .token_stride = p.x.token_stride,
                  .feature_stride = p.x.feature_stride,
                  .vectors = vectors,
                  .n = static_cast<int32_t>(p.x.n),
                  .features = p.x.features,
                  .block = block,
                  .blocks = call.problem.input_blocks(),
                  .tokens = plan.tokens,
                  .slices = plan.slices,
                  .to = static_cast<char*>(call.workspace.data) + workspace_parts(call.problem).partial_bytes};
  args.x = pack.to;
  args.x_token_bytes = static_cast<uint32_t>(16 * patch_vectors);
  args.x_patch_vectors = static_cast<uint32_t>(patch_vectors * plan.tokens);
  args.slice_vectors = static_cast<uint32_t>(call.problem.input_blocks() * block * plan.tokens * kSize / 16);
  args.early = overlap;
  return pack_x(pack, overlap, stream_of(call));
}

template <class T>
Status launch_round(const Product& p, const CudaCall& call) {
  const int32_t block = p.layout.block_size;
  const bool gated = p.gates != nullptr, overlap = kernels_overlap(p.layout.device.index);
  const Plan plan = plan_of(call.problem, gated, call.card);
  const bool y_pairs = in_pairs<T>(p.y);
  Args args{.walk = walk_on_device(p.layout, p.by_in),
            .x = nullptr,
            .w = p.w,
            .gates = static_cast<const float*>(p.gates),
            .x_token_bytes = 0,
            .x_patch_vectors = 0,
            .n = static_cast<int32_t>(p.x.n),
            .slices = plan.slices,
            .slice_vectors = 0,
            .warps = plan.warps,
            .last_block = static_cast<int32_t>(call.problem.input_blocks() - 1),
            .ragged = static_cast<int32_t>(p.x.features % block),
            .early = false,
            .y_pairs = y_pairs,
            .plain = y_pairs && without_epilogue(p),
            .outputs = p.outputs(),
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation, p.glu ? p.y.features : 0},
            .partial = call.problem.slots > 0 ? static_cast<float*>(call.workspace.data) : nullptr};
  BS_RETURN_IF_ERROR(place_x<T>(p, call, plan, overlap, args));
  BS_RETURN_IF_ERROR(with_kernel<T>(block, plan.tokens, p.by_in, gated, [&]<class K>() {
    return cuda::launch({.blocks = (call.problem.output_blocks() + call.problem.slots) * K::Tile::kStrips * plan.slices,
                         .threads = 32 * plan.warps,
                         .shared_bytes = K::shared_bytes(plan.warps),
                         .stream = stream_of(call),
                         .overlap = overlap},
                        stream_w_product<K>, args);
  }));
  if (args.partial == nullptr) return {};
  const int64_t most = call.problem.slots / 2 * p.x.n * block / 2;  // a split row has at least two slices
  const int64_t blocks = std::min<int64_t>(call.card.multiprocessors, most / kCombineThreads + 1);
  return cuda::launch({.blocks = blocks, .threads = kCombineThreads, .stream = stream_of(call), .overlap = overlap},
                      stream_w_combine<T>, args, block);
}

template <class T>
Status prepare() {
  for (int32_t block : {8, 16, 32, 64, 128}) {
    for (int32_t tokens : {8, 32, 64}) {
      for (bool by_in : {false, true}) {
        for (bool gated : {false, true}) {
          BS_RETURN_IF_ERROR(with_kernel<T>(block, tokens, by_in, gated, [&]<class K>() {
            return cuda::prepare(stream_w_product<K>, K::most_shared_bytes);
          }));
        }
      }
    }
  }
  BS_RETURN_IF_ERROR(cuda::prepare(stream_w_combine<T>, 0));
  return prepare_pack();
}

}  // namespace
}  // namespace blocksparse::gemm::stream_w
