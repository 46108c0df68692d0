// dW[i] = gate_i dy_out^T x_in for few tokens. Writing dW is the bound, so only registers lie between products and dW.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, or f32 rounded to tf32; sums in f32
// Who does what
//   pack      a small kernel in front puts x and dy in mma's order, in chunks of 32 tokens (f32: 16). It takes any
//   order
//             of memory and any edge
//   patches   blocks, or 32 x 32 parts of large ones, in the order of rows of W; a tile is a run of patches
//   held      up to 64 tokens: every warp takes an equal number of tiles, and keeps dy while the row stays
//   deep      more tokens: a warp has a tile, or 2 or 4 warps share one and divide its tokens
//   finish    a lane has 8 neighbouring inputs (b = 16: 4, b = 8: 2) of a row of dW, and stores them as they are
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/warpgroup.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/stream_w/pack.h"
#include "gemm/cuda/wgrad_stream/pack.h"
#include "gemm/cuda/wgrad_stream/tile.cuh"

namespace blocksparse::gemm::wgrad_stream {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// ---- Up to 64 tokens ------------------------------------------------------------------------------------------------

// A kernel of up to 64 tokens. Wide: blocks are several patches, and a tile has two of a block side by side.
template <class Element, int U, int C, Store S, bool Wide = false>
struct HeldGradient {
  using T = Element;
  using Tile = wgrad_stream::Tile<T, U, Wide ? 8 : 4>;
  static constexpr int patch = U, chunks = C;
  static constexpr Store store = S;
  static constexpr int ahead = Wide ? 1 : (U == 32 ? 2 : 4) / C;  // tiles of x that a warp has under way
  // How many thread blocks an SM holds; this decides the registers of a thread.
  static constexpr int resident = (Wide || (U == 32 && S == Store::wide) ? 4 : 5) - C;
  static constexpr int batch = 32 / Tile::kPatches;  // tiles whose patches the lanes know
};

template <class K>
using HeldInputs = uint32_t[K::chunks][K::Tile::kGroups][4];

// The tiles of a warp. Its lanes know the patches of this batch of tiles and of the next.
template <class K>
struct HeldTiles {
  const Args& g;
  int first, count;
  DwTile now, next;

  __device__ HeldTiles(const Args& g, int warp) : g(g) {
    first = static_cast<int>(int64_t{warp} * g.tiles / g.warps);
    count = static_cast<int>(int64_t{warp + 1} * g.tiles / g.warps) - first;
    now = batch(0), next = batch(1);
  }
  __device__ DwTile batch(int i) const {
    return dw_tile_of<K::patch>(g, (first + i * K::batch) * K::Tile::kPatches + static_cast<int>(threadIdx.x) % 32);
  }
  // Loads x of tile i of this batch, or of the next where i is beyond it.
  __device__ void load(HeldInputs<K>& x, int i) const {
    const int known = i < K::batch ? now.input : next.input;
#pragma unroll
    for (int r = 0; r < K::Tile::kPatches; ++r) {
      const int patch = __shfl_sync(~0u, known, (i * K::Tile::kPatches + r) % 32);
#pragma unroll
      for (int c = 0; c < K::chunks; ++c) {
        K::Tile::load(x[c] + r * K::Tile::kOfPatch, g.x, K::chunks, patch, c);
      }
    }
  }
};

template <class K>
struct HeldOutputs {
  uint32_t data[K::chunks][K::Tile::kOfPatch][4];
  int patch = -1;
};

template <class K>
__device__ inline void finish_tile(const HeldTiles<K>& tiles, int i, int tile, const HeldInputs<K>& x,
                                   HeldOutputs<K>& dy) {
  const Args& g = tiles.g;
  const int lane = i * K::Tile::kPatches, patches = min(K::Tile::kPatches, g.patches - tile * K::Tile::kPatches);
  for (int done = 0; done < patches;) {
    const int output = __shfl_sync(~0u, tiles.now.output, lane + done);
    if (output != dy.patch) {
      dy.patch = output;
#pragma unroll
      for (int c = 0; c < K::chunks; ++c) K::Tile::load(dy.data[c], g.dy, K::chunks, output, c);
    }
    typename K::Tile::Sums sum = {};
#pragma unroll
    for (int c = 0; c < K::chunks; ++c) K::Tile::multiply(x[c], dy.data[c], sum);
    const int last = end_of_row<typename K::Tile>(tiles.now, lane, done, patches);
    store_patches<typename K::Tile, typename K::T, K::patch, K::store>(g, tiles.now, lane, done, last, sum);
    done = last;
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads, K::resident) wgrad_stream_held(const __grid_constant__ Args g) {
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (warp >= g.warps) return;
  HeldTiles<K> tiles(g, warp);
  ptx::griddepcontrol_wait();
  HeldInputs<K> x[K::ahead];
#pragma unroll
  for (int d = 0; d < K::ahead; ++d) {
    if (d < tiles.count) tiles.load(x[d], d);
  }
  HeldOutputs<K> dy;
#pragma unroll 1
  for (int begin = 0; begin < tiles.count; begin += K::batch) {
#pragma unroll 1
    for (int i = 0; i < K::batch; i += K::ahead) {
#pragma unroll
      for (int d = 0; d < K::ahead; ++d) {
        if (begin + i + d >= tiles.count) return;
        finish_tile<K>(tiles, i + d, tiles.first + begin + i + d, x[d], dy);
        if (begin + i + d + K::ahead < tiles.count) tiles.load(x[d], i + d + K::ahead);
      }
    }
    tiles.now = tiles.next;
    tiles.next = tiles.batch(begin / K::batch + 2);
  }
}

// ---- More tokens ----------------------------------------------------------------------------------------------------

// A kernel of more tokens. A tile of 4 groups with two stages is fastest in a matrix of 4096 x 4096. One of 8 groups
// with one stage pays for b = 64 in large matrices: 86.9 us after 120 (12288 x 12288, 512 tokens, density .1, H200,
// 2026-11-21).
template <class Element, int U, Store S, int Groups = 4, int Stages = 2, int Resident = 4>
struct DeepGradient {
  using T = Element;
  using Tile = wgrad_stream::Tile<T, U, Groups>;
  static constexpr int stages = Stages, resident = Resident;
  static constexpr int patch = U;
  static constexpr Store store = S;
  static constexpr int sums_bytes = Tile::kSums * 4 * 32 * 4;  // of a warp
  static constexpr int shared_bytes = kWarps * sums_bytes;
};

// Adds up this warp's part of the tokens.
template <class K>
__device__ inline void sum_chunks(const Args& g, const DwTile& known, int output, int part,
                                  typename K::Tile::Sums& sum) {
  using Tile = typename K::Tile;
  typename Tile::Inputs x[K::stages];
  typename Tile::Outputs dy[K::stages];
  const auto load = [&](int stage, int chunk) {
    Tile::load(dy[stage], g.dy, g.chunks, output, chunk);
#pragma unroll
    for (int r = 0; r < Tile::kPatches; ++r) {
      Tile::load(x[stage] + r * Tile::kOfPatch, g.x, g.chunks, __shfl_sync(~0u, known.input, r), chunk);
    }
  };
  if constexpr (K::stages == 1) {
#pragma unroll 1
    for (int chunk = part; chunk < g.chunks; chunk += g.warps) {
      load(0, chunk);
      Tile::multiply(x[0], dy[0], sum);
    }
  } else {
    if (part < g.chunks) load(0, part);
#pragma unroll 1
    for (int chunk = part; chunk < g.chunks; chunk += 2 * g.warps) {
      if (chunk + g.warps < g.chunks) load(1, chunk + g.warps);
      Tile::multiply(x[0], dy[0], sum);
      if (chunk + g.warps >= g.chunks) break;
      if (chunk + 2 * g.warps < g.chunks) load(0, chunk + 2 * g.warps);
      Tile::multiply(x[1], dy[1], sum);
    }
  }
}

// Adds the sums of the warps of a tile, in their order; the first warp has the result.
template <class K>
__device__ inline void add_parts(const Args& g, int part, float* shared, typename K::Tile::Sums& sum) {
  if (g.warps == 1) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int barrier = 1 + warp / g.warps;
  constexpr int kOfWarp = K::sums_bytes / 4;
  if (part != 0) {
#pragma unroll
    for (int i = 0; i < K::Tile::kSums; ++i) {
      reinterpret_cast<float4*>(shared + warp * kOfWarp)[i * 32 + lane] = {sum[i][0], sum[i][1], sum[i][2], sum[i][3]};
    }
  }
  ptx::bar_sync(barrier, 32 * g.warps);
  if (part == 0) {
    for (int other = warp + 1; other < warp + g.warps; ++other) {
#pragma unroll
      for (int i = 0; i < K::Tile::kSums; ++i) {
        const float4 more = reinterpret_cast<const float4*>(shared + other * kOfWarp)[i * 32 + lane];
        sum[i][0] += more.x, sum[i][1] += more.y, sum[i][2] += more.z, sum[i][3] += more.w;
      }
    }
  }
  ptx::bar_sync(barrier, 32 * g.warps);
}

template <class K>
__global__ void __launch_bounds__(kThreads, K::resident) wgrad_stream_deep(const __grid_constant__ Args g) {
  using Tile = typename K::Tile;
  extern __shared__ float shared[];
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int tile = warp / g.warps, part = warp % g.warps, lane = static_cast<int>(threadIdx.x) % 32;
  const DwTile known = dw_tile_of<K::patch>(g, tile * Tile::kPatches + lane % Tile::kPatches);
  const int patches = min(Tile::kPatches, g.patches - tile * Tile::kPatches);
  ptx::griddepcontrol_wait();
  if (patches <= 0) return;
  int done = 0;
  do {  // not a loop where a tile is one patch: a loop would hold on to registers
    const int output = __shfl_sync(~0u, known.output, done);
    typename Tile::Sums sum = {};
    sum_chunks<K>(g, known, output, part, sum);
    add_parts<K>(g, part, shared, sum);
    const int last = end_of_row<Tile>(known, 0, done, patches);
    if (part == 0) store_patches<Tile, typename K::T, K::patch, K::store>(g, known, 0, done, last, sum);
    done = last;
  } while (Tile::kPatches > 1 && done < patches);
}

// Gates' gradients of blocks that are several patches: adds the patches in their order.
__global__ void __launch_bounds__(kThreads)
    add_gate_sums(const float* parts, float* to, int32_t blocks, int32_t parts_of_block, bool accumulate) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= blocks) return;
  float sum = 0;
  for (int k = 0; k < parts_of_block; ++k) sum += parts[int64_t{i} * parts_of_block + k];
  to[i] = accumulate ? to[i] + sum : sum;
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Calls body.template operator()<K>(kernel, bytes of shared memory) with the kernel type K.
template <class T, Store S, class Body>
Status with_kernel(int32_t patch, bool wide, int64_t chunks, Body body) {
  const auto with = [&]<int U>() {
    if constexpr (U == 32) {
      using One = HeldGradient<T, U, 1, S, true>;
      using Two = HeldGradient<T, U, 2, S, true>;
      if (wide && chunks == 1) return body.template operator()<One>(wgrad_stream_held<One>, 0);
      if (wide && chunks == 2) return body.template operator()<Two>(wgrad_stream_held<Two>, 0);
    }
    if (chunks == 1)
      return body.template operator()<HeldGradient<T, U, 1, S>>(wgrad_stream_held<HeldGradient<T, U, 1, S>>, 0);
    if (chunks == 2)
      return body.template operator()<HeldGradient<T, U, 2, S>>(wgrad_stream_held<HeldGradient<T, U, 2, S>>, 0);
    if constexpr (U == 32 && S != Store::any) {
      using Wide = DeepGradient<T, U, S, 8, 1, 3>;
      if (wide) return body.template operator()<Wide>(wgrad_stream_deep<Wide>, Wide::shared_bytes);
    }
    using Deep = DeepGradient<T, U, S>;
    return body.template operator()<Deep>(wgrad_stream_deep<Deep>, Deep::shared_bytes);
  };
  switch (patch) {
    case 8: return with.template operator()<8>();
    case 16: return with.template operator()<16>();
    default: return with.template operator()<32>();
  }
}

// The pairs that one launch copies, from `next` on. `next` becomes the first pair behind them.
template <class T>
Pack next_pack(const WeightGradient& g, size_t& next) {
  constexpr int kChunkTokens = chunk_tokens(sizeof(T));
  const auto stride = [](const Activations& a) { return a.features_first() ? a.feature_stride : a.token_stride; };
  Pack pack{};
  for (; next < g.pairs.size() && pack.terms < Term::kMost; ++next) {
    const GradTerm term = g.term(next);
    if (term.x.n == 0) continue;
    pack.features[0] = term.x.features, pack.features[1] = term.dy.features;
    const int32_t first = pack.terms == 0 ? 0 : pack.term[pack.terms - 1].first + pack.term[pack.terms - 1].n;
    const Activations* sides[2] = {&term.x, &term.dy};
    Term& to = pack.term[pack.terms++];
    to.first = first, to.n = static_cast<int32_t>(term.x.n);
    for (int s = 0; s < 2; ++s) {
      to.data[s] = sides[s]->data;
      to.stride[s] = stride(*sides[s]);
      to.features_first[s] = sides[s]->features_first();
      to.vectors[s] = matrix_of<T>(*sides[s]).aligned;
    }
    pack.chunks = ceil_div(to.first + to.n, kChunkTokens);
  }
  return pack;
}

// Queues the copies of x and dy, and returns how many chunks they have.
template <class T>
Result<int32_t> place_terms(const WeightGradient& g, const CudaCall& call, const Plan& plan, bool overlap, Args& args) {
  int32_t chunks = 0;
  for (size_t next = 0; next < g.pairs.size();) chunks += next_pack<T>(g, next).chunks;
  args.x = static_cast<const uint4*>(call.workspace.data);
  args.dy = args.x + plan.input_patches * chunks * plan.patch * 4;
  int32_t first_chunk = 0;
  for (size_t next = 0; next < g.pairs.size();) {
    Pack pack = next_pack<T>(g, next);
    if (pack.terms == 0) continue;
    pack.first_chunk = first_chunk, pack.all_chunks = chunks;
    first_chunk += pack.chunks;
    pack.patches[0] = static_cast<int32_t>(plan.input_patches),
    pack.patches[1] = static_cast<int32_t>(plan.output_patches);
    pack.to[0] = const_cast<uint4*>(args.x), pack.to[1] = const_cast<uint4*>(args.dy);
    BS_RETURN_IF_ERROR(pack_operands(pack, sizeof(T), plan.patch, overlap, stream_of(call)));
  }
  return chunks;
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  const Plan plan = plan_of(call.problem);
  if (plan.patches == 0) return {};
  const int32_t block = g.layout.block_size;
  const bool overlap = stream_w::kernels_overlap(g.layout.device.index);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  Args args{.refs = walk_on_device(g.layout, false).refs,
            .out_of = out_of_on_device(g.layout),
            .starts = walk_on_device(g.layout, false).starts,
            .x = nullptr,
            .dy = nullptr,
            .chunks = 0,
            .patches = static_cast<int32_t>(plan.patches),
            .tiles = 0,
            .warps = 0,
            .shift = __builtin_ctz(static_cast<unsigned>(block)),
            .side = __builtin_ctz(static_cast<unsigned>(block / plan.patch)),
            .outputs = g.layout.out_features,
            .inputs = g.layout.in_features,
            .dw = g.dw,
            .wide = g.dw_dtype == DType::f32,
            .accumulate = g.accumulate,
            .vectors = aligned(g.dw),
            .w_vectors = aligned(g.w),
            .gates = static_cast<const float*>(g.gates),
            .w = g.w,
            .gate_sums = static_cast<float*>(g.dgates)};
  const auto chunks = place_terms<T>(g, call, plan, overlap, args);
  if (!chunks.ok()) return chunks.status();
  args.chunks = *chunks;
  const bool parts = g.dgates != nullptr && (args.side > 0 || g.accumulate);
  if (parts) args.gate_sums = reinterpret_cast<float*>(static_cast<char*>(call.workspace.data) + plan.packed_bytes);
  const auto launch = [&]<class K>(auto kernel, int shared_bytes) {
    args.tiles = ceil_div(args.patches, K::Tile::kPatches);
    int64_t warps = 0;
    if (shared_bytes == 0) {
      warps = args.warps = std::min(args.tiles, call.card.multiprocessors * kWarps * K::resident);
    } else {
      args.warps = warps_of_tile(args.tiles, args.chunks, call.card);
      warps = int64_t{args.tiles} * args.warps;
    }
    return cuda::launch({.blocks = ceil_div(warps, kWarps),
                         .threads = kThreads,
                         .shared_bytes = args.warps == 1 ? 0 : shared_bytes,
                         .stream = stream_of(call),
                         .overlap = overlap},
                        kernel, args);
  };
  const bool plain = args.vectors && !g.accumulate && g.gates == nullptr && g.dgates == nullptr &&
                     args.outputs % block == 0 && args.inputs % block == 0;
  const auto with = [&]<Store S>() { return with_kernel<T, S>(plan.patch, args.side > 0, args.chunks, launch); };
  if (!plain) BS_RETURN_IF_ERROR(with.template operator()<Store::any>());
  else if (args.wide) BS_RETURN_IF_ERROR(with.template operator()<Store::wide>());
  else if constexpr (sizeof(T) == 2) BS_RETURN_IF_ERROR(with.template operator()<Store::narrow>());
  if (!parts) return {};
  const auto blocks = static_cast<int32_t>(g.layout.blocks);
  return cuda::launch({.blocks = ceil_div(blocks, kThreads), .threads = kThreads, .stream = stream_of(call)},
                      add_gate_sums, args.gate_sums, static_cast<float*>(g.dgates), blocks, 1 << 2 * args.side,
                      g.accumulate);
}

template <class T>
Status prepare() {
  const auto prepare = [&]<class K>(auto kernel, int shared_bytes) { return cuda::prepare(kernel, shared_bytes); };
  for (int32_t patch : {8, 16, 32}) {
    for (int32_t chunks : {1, 2, 3}) {
      for (bool wide : {false, true}) {
        if constexpr (sizeof(T) == 2) {
          BS_RETURN_IF_ERROR((with_kernel<T, Store::narrow>(patch, wide, chunks, prepare)));
        }
        BS_RETURN_IF_ERROR((with_kernel<T, Store::wide>(patch, wide, chunks, prepare)));
        BS_RETURN_IF_ERROR((with_kernel<T, Store::any>(patch, wide, chunks, prepare)));
      }
    }
  }
  BS_RETURN_IF_ERROR(cuda::prepare(add_gate_sums, 0));
  return prepare_pack();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_stream
