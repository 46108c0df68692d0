// y = f(x W^T + bias + residual) for up to 64 tokens in f32, and dgrad likewise, by fused multiply-add. W is streamed
// once. Where the caller allows tf32, stream_w/kernel.cuh does it.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   f32
// Who does what
//   grid      a thread block for each piece and strip of up to 32 outputs, as many as possible resident at once
//   warps     take the patches of a piece in turn
//   load      cp.async, some patches ahead, into a ring of each warp's own: no barrier of warps in the loop
//   compute   tile.cuh
//   finish    all threads add the sums of the warps, in the order of warps; slices of split rows go to the workspace
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/current_card.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/stream_w/pack.h"
#include "gemm/cuda/stream_w_f32/tile.cuh"

namespace blocksparse::gemm::stream_w_f32 {

namespace {

// ---- Config ---------------------------------------------------------------------------------------------------------

template <int Outputs, int Tokens, bool ByIn>
struct Kernel {
  using Tile = stream_w_f32::Tile<Outputs, Tokens, ByIn>;
  using Copy = stream_w_f32::Copy<Tile, ByIn>;
  using Sums = stream_w_f32::Sums<Tile, ByIn>;
  static constexpr int outputs = Outputs, tokens = Tokens;
  static constexpr int stages = Tile::kBytes <= 4200 ? 4 : 3;  // 12 to 16 warps fill the shared memory of an SM
  static constexpr int ring_bytes = stages * Tile::kBytes;
  static constexpr int most_warps = Outputs == 8 ? 2 : Outputs == 16 ? 4 : 8;
  static constexpr int pitch = Outputs + 4;  // of the sums in shared memory
  static_assert(Tokens * pitch * static_cast<int>(sizeof(float)) <= ring_bytes, "sums take the place of the ring");
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// The patches of a piece that one warp takes, in order. Each lane knows the block of one of the next 32.
template <class K>
class Patches {
 public:
  static constexpr int kBlocks = K::Tile::kBlocks, kAhead = 32 / kBlocks;

  __device__ Patches(const Args& p, const Piece& piece)
      : refs_(p.walk.refs + piece.first),
        blocks_(piece.last - piece.first),
        warps_(p.warps),
        shift_(kBlocks == 2 ? 0 : 31 - __clz(p.block / K::Tile::kDepth)) {
    const int patches = kBlocks == 2 ? ceil_div(blocks_, 2) : blocks_ << shift_;
    count_ = max(0, ceil_div(patches - warp(), warps_));
    now_ = fetch(0);
    next_ = fetch(kAhead);
  }

  __device__ int count() const { return count_; }

  // Calls body(refs, part) for patch i, which rises by one a call.
  template <class Body>
  __device__ void next(int i, Body body) {
    if (i % kAhead == 0 && i > 0) {
      now_ = next_;
      next_ = fetch(i + kAhead);
    }
    BlockRef refs[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int lane = i % kAhead * kBlocks + k;
      refs[k] = {__shfl_sync(~0u, now_.from, lane), __shfl_sync(~0u, now_.weight, lane)};
    }
    body(refs, kBlocks == 2 ? 0 : patch(i) & ((1 << shift_) - 1));
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int patch(int i) const { return warp() + warps_ * i; }
  __device__ BlockRef fetch(int first) const {
    const int block =
        kBlocks == 2 ? 2 * patch(first + lane_id() / 2) + lane_id() % 2 : patch(first + lane_id()) >> shift_;
    return block < blocks_ ? refs_[block] : BlockRef{-1, 0};
  }

  const BlockRef* refs_;
  int blocks_, warps_, shift_, count_;
  BlockRef now_, next_;
};

// Adds the sums of the warps, in the order of warps. All reads are under way before the first store.
template <class K, int Warps>
__device__ inline void finish(const Args& p, const Piece& piece, int strip, const float* staged) {
  constexpr int kStep = 32 * Warps, kItems = ceil_div(K::tokens * K::outputs, kStep);
  const bool slice = p.partial != nullptr && piece.slot >= 0;
  const bool by_output = slice || p.finish.y.features_contiguous();
  const auto token_of = [&](int e) { return by_output ? e / K::outputs : e % K::tokens; };
  const auto output_of = [&](int e) { return by_output ? e % K::outputs : e / K::tokens; };
  float sums[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kStep;
    sums[i] = 0;
    if (e >= K::tokens * K::outputs) break;
    const float* from = staged + token_of(e) * K::pitch + output_of(e);
#pragma unroll
    for (int warp = 0; warp < Warps; ++warp) sums[i] += from[warp * (K::ring_bytes / 4)];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kStep, token = token_of(e);
    if (e >= K::tokens * K::outputs || token >= p.n) continue;
    const int in_block = strip * K::outputs + output_of(e);
    const int64_t output = int64_t{piece.to} * p.block + in_block;
    if (slice) p.partial[(int64_t{piece.slot} * p.n + token) * p.block + in_block] = sums[i];
    else if (output >= p.outputs) continue;
    else if (p.plain) *p.finish.at<float>(token, output) = sums[i];
    else p.finish.store<float>(token, output, sums[i]);
  }
}

template <class K>
__global__ void __launch_bounds__(32 * K::most_warps, 16 / K::most_warps)
    stream_w_f32_product(const __grid_constant__ Args p) {
  extern __shared__ float4 shared[];
  ptx::griddepcontrol_wait();
  const int strips = p.block / K::outputs, item = static_cast<int>(blockIdx.x) / strips;
  const int strip = static_cast<int>(blockIdx.x) % strips;
  if (p.partial != nullptr && item >= p.walk.counts[0]) return;  // the grid has room for more pieces than there are
  const Piece piece = p.walk.pieces[item];
  float* of_warp = reinterpret_cast<float*>(shared) + static_cast<int>(threadIdx.x) / 32 * (K::ring_bytes / 4);
  const uint32_t ring = ptx::shared_address(of_warp);
  const typename K::Copy copy(p, strip);
  Patches<K> patches(p, piece);
  typename K::Sums sums;
  const bool gated = p.gates != nullptr;
  const int count = patches.count();
  uint32_t load = ring, use = ring;
  const auto advance = [&](uint32_t& stage) {
    stage += K::Tile::kBytes;
    if (stage == ring + K::ring_bytes) stage = ring;
  };
#pragma unroll 1
  for (int i = 1 - K::stages; i < count; ++i) {
    if (i >= 0) {
      ptx::cp_async_wait<K::stages - 2>();
      __syncwarp();  // all lanes' copies of this patch have arrived, and all lanes are done with the patch before
    }
    const int ahead = i + K::stages - 1;
    if (ahead < count) {
      patches.next(ahead, [&](const BlockRef(&refs)[K::Tile::kBlocks], int part) { copy(refs, part, load); });
      advance(load);
    }
    ptx::cp_async_commit();
    if (i >= 0) {
      sums.add(use, gated);
      advance(use);
    }
  }
  __syncwarp();
  sums.for_each([&](int token, int output, float sum) { of_warp[token * K::pitch + output] = sum; });
  __syncthreads();
  const auto* staged = reinterpret_cast<const float*>(shared);
  if constexpr (K::most_warps == 2) finish<K, 2>(p, piece, strip, staged);
  else if (K::most_warps == 4 || p.warps == 4) finish<K, 4>(p, piece, strip, staged);
  else finish<K, 8>(p, piece, strip, staged);
}

constexpr int kThreads = 256;

// Adds the slices of split rows in the order of slots.
__global__ void __launch_bounds__(kThreads) stream_w_f32_combine(const __grid_constant__ Args p) {
  ptx::griddepcontrol_wait();
  const int64_t width = int64_t{p.n} * p.block, count = p.walk.counts[1] * width;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const Split split = p.walk.splits[i / width];
    const int64_t inner = i % width, output = int64_t{split.to} * p.block + inner % p.block;
    if (output >= p.outputs) continue;
    float sum = 0;
    for (int32_t slot = 0; slot < split.slots; ++slot) sum += p.partial[(split.first_slot + slot) * width + inner];
    p.finish.store<float>(inner / p.block, output, sum);
  }
}

struct PackedX {
  const float* x;
  int64_t token_stride, feature_stride;
  int32_t n, features, padded;
  float* to;  // [n][padded]; elements beyond the features are not read
};

// Packs x that does not lie in rows at multiples of 16 bytes.
__global__ void __launch_bounds__(kThreads) stream_w_f32_pack(const __grid_constant__ PackedX p) {
  ptx::griddepcontrol_wait();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool rows = p.feature_stride == 1;
  const auto token = static_cast<int32_t>(rows ? i / p.features : i % p.n);
  const auto feature = static_cast<int32_t>(rows ? i % p.features : i / p.n);
  if (token >= p.n || feature >= p.features) return;
  p.to[int64_t{token} * p.padded + feature] = p.x[token * p.token_stride + feature * p.feature_stride];
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Calls body.template operator()<K>() with the kernel type K.
template <class Body>
Status with_kernel(int32_t block, int32_t tokens, bool by_in, Body body) {
  const auto with_tokens = [&]<int Outputs, bool ByIn>() {
    if (tokens <= 8) return body.template operator()<Kernel<Outputs, 8, ByIn>>();
    return tokens <= 32 ? body.template operator()<Kernel<Outputs, 32, ByIn>>()
                        : body.template operator()<Kernel<Outputs, 64, ByIn>>();
  };
  const auto with_outputs = [&]<int Outputs>() {
    return by_in ? with_tokens.template operator()<Outputs, true>() : with_tokens.template operator()<Outputs, false>();
  };
  switch (block) {
    case 8: return with_outputs.template operator()<8>();
    case 16: return with_outputs.template operator()<16>();
    default: return with_outputs.template operator()<32>();
  }
}

// Sets where x is read: in place, or a copy in the workspace.
inline Status place_x(const Product& p, const CudaCall& call, bool overlap, Args& args) {
  const auto* x = static_cast<const float*>(p.x.data);
  if (p.x.features == 0) return {};
  const int64_t stride = p.x.n == 1 ? 0 : p.x.token_stride;
  if (!p.x.features_first() && reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 4 == 0 &&
      stride / 4 * p.x.n <= UINT32_MAX) {
    args.x = x;
    args.x_token = static_cast<uint32_t>(stride / 4);
    return {};
  }
  const int64_t padded = round_up(p.x.features, 4), count = p.x.n * p.x.features;
  const PackedX pack{.x = x,
                     .token_stride = p.x.token_stride,
                     .feature_stride = p.x.feature_stride,
                     .n = static_cast<int32_t>(p.x.n),
                     .features = static_cast<int32_t>(p.x.features),
                     .padded = static_cast<int32_t>(padded),
                     .to = reinterpret_cast<float*>(static_cast<char*>(call.workspace.data) +
                                                    stream_w::workspace_parts(call.problem).partial_bytes)};
  args.x = pack.to;
  args.x_token = static_cast<uint32_t>(padded / 4);
  return cuda::launch(
      {.blocks = ceil_div(count, kThreads), .threads = kThreads, .stream = stream_of(call), .overlap = overlap},
      stream_w_f32_pack, pack);
}

inline Status launch(const Product& p, const CudaCall& call) {
  const int32_t block = p.layout.block_size;
  const bool overlap = stream_w::kernels_overlap(p.layout.device.index);
  const stream_w::Plan plan = stream_w::plan_of(call.problem, p.gates != nullptr, call.card);
  Args args{.walk = walk_on_device(p.layout, p.by_in),
            .x = nullptr,
            .w = static_cast<const float*>(p.w),
            .gates = static_cast<const float*>(p.gates),
            .x_token = 0,
            .n = static_cast<int32_t>(p.x.n),
            .inputs = static_cast<int32_t>(p.x.features),
            .block = block,
            .warps = plan.warps,
            .outputs = p.y.features,
            .plain = without_epilogue(p),
            .finish = {matrix_of<float>(p.y), matrix_of<float>(p.residual), p.bias, p.activation},
            .partial = call.problem.slots > 0 ? static_cast<float*>(call.workspace.data) : nullptr};
  BS_RETURN_IF_ERROR(place_x(p, call, overlap, args));
  BS_RETURN_IF_ERROR(with_kernel(block, plan.tokens, p.by_in, [&]<class K>() {
    return cuda::launch({.blocks = (call.problem.output_blocks() + call.problem.slots) * (block / K::outputs),
                         .threads = 32 * plan.warps,
                         .shared_bytes = plan.warps * K::ring_bytes,
                         .stream = stream_of(call),
                         .overlap = overlap},
                        stream_w_f32_product<K>, args);
  }));
  if (args.partial == nullptr) return {};
  const int64_t most = call.problem.slots / 2 * p.x.n * block;  // a split row has at least two slices
  const int64_t blocks = std::min<int64_t>(4 * call.card.multiprocessors, most / kThreads + 1);
  return cuda::launch({.blocks = blocks, .threads = kThreads, .stream = stream_of(call), .overlap = overlap},
                      stream_w_f32_combine, args);
}

inline Status prepare() {
  const auto card = cuda::current_card();
  if (!card.ok()) return card.status();
  for (int32_t block : {8, 16, 32}) {
    for (int32_t tokens : {8, 32, 64}) {
      for (bool by_in : {false, true}) {
        BS_RETURN_IF_ERROR(with_kernel(block, tokens, by_in, [&]<class K>() {
          // stream_w::plan_of() asks for no more than the card has.
          const int bytes = std::min(card->shared_bytes, K::most_warps * K::ring_bytes);
          return cuda::prepare_for_many(stream_w_f32_product<K>, bytes);
        }));
      }
    }
  }
  BS_RETURN_IF_ERROR(cuda::prepare(stream_w_f32_combine, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(stream_w_f32_pack, 0));
  return stream_w::prepare_pack();
}

}  // namespace
}  // namespace blocksparse::gemm::stream_w_f32
