#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/wgmma/tables.h"

namespace blocksparse::gemm::wgmma {
namespace {

constexpr int kPackThreads = 256;
constexpr int kAtOnce = 2;  // times four matrices that a warp has under way

struct Pack {
  const Source* sources;
  const uint16_t* w;
  const float* gates;
  bool bf16;
  bool w_aligned;
  char* to;
  int64_t patches;
  int64_t inputs;
  bool by_in;
};

template <class T>
__device__ uint32_t scale_pair(uint32_t pair, float gate) {
  const T low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
  return narrow_pair(gate * widen(low), gate * widen(high), T{});
}

__device__ uint32_t gated(uint32_t pair, const float* gates, int32_t weight, bool bf16) {
  if (gates == nullptr) return pair;
  return bf16 ? scale_pair<Bf16>(pair, gates[weight]) : scale_pair<F16>(pair, gates[weight]);
}

__device__ uint32_t load_pair(const uint16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint32_t*>(from);
  return from[0] | static_cast<uint32_t>(from[1]) << 16;
}

// Loads 16 bytes of W.
__device__ void load_vector(const uint16_t* from, bool aligned, uint32_t (&words)[4]) {
  if (aligned) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = load_pair(from + 2 * i, false);
}

// Packs patches: core matrices of 8 outputs x 8 inputs, one after another. Four lanes have one row of four matrices
// that lie side by side in W. A warp reads 512 bytes of W, and rows of 16 bytes go to their matrices.
template <Kind Kind, int B>
__global__ void __launch_bounds__(kPackThreads) wgmma_pack(const __grid_constant__ Pack p) {
  constexpr Form form = form_of(Kind);
  constexpr int kRows = form.band_outputs / 8, kMatrices = kRows * form.patch_inputs / 8;
  constexpr int kColumns = form.patch_inputs / B, kSide = B / 8, kOfBlock = kSide * kSide;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4;
  const int64_t first = (int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / 32 * (4 * kAtOnce) + lane % 4;
  Source sources[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t matrix = first + 4 * i;  // in the order of the patch's blocks, and of W within each
    sources[i] = {kNoPatch, 0};
    if (matrix < p.patches * kMatrices) sources[i] = p.sources[matrix / kOfBlock];
  }
  uint32_t words[kAtOnce][4] = {};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (sources[i].weight < 0) continue;
    const int of_block = static_cast<int>((first + 4 * i) % kOfBlock);
    const int at = (of_block / kSide * 8 + row) * B + of_block % kSide * 8;
    load_vector(p.w + int64_t{sources[i].weight} * (B * B) + at, p.w_aligned, words[i]);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (p.by_in) {
      cuda::turn_quad(words[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[i][k] = ptx::movmatrix_trans(words[i][k]);
      cuda::turn_quad(words[i]);
    }
    if (sources[i].weight == kNoPatch) continue;
    const auto in_patch = static_cast<int>((first + 4 * i) % kMatrices);
    const int block = in_patch / kOfBlock, up = in_patch % kOfBlock / kSide, along = in_patch % kSide;
    const int in = p.by_in ? up : along, out = p.by_in ? along : up;
    const int64_t inside = p.inputs - int64_t{sources[i].from} * B - 8 * in;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t& word = words[i][k];
      if (sources[i].weight >= 0) word = gated(word, p.gates, sources[i].weight, p.bf16);
      if (inside < 2 * k + 2) word = inside < 2 * k + 1 ? 0 : word & 0xffff;  // W may hold anything beyond the edge
    }
    const int place = (block % kColumns * kSide + in) * kRows + block / kColumns * kSide + out;
    *reinterpret_cast<uint4*>(p.to + ((first + 4 * i) / kMatrices * kMatrices + place) * 128 + row * 16) = {
        words[i][0], words[i][1], words[i][2], words[i][3]};
  }
}

// Copies blocks unchanged. Thread blocks take the entries of the list in turn.
struct Copy {
  DeviceWalk walk;
  const uint16_t* w;
  const float* gates;
  bool bf16, w_aligned, by_in;
  int32_t blocks, block_shift;
  int32_t last_block, inside;  // the last block of inputs, and how many inputs it has
  uint32_t* to;
};

__global__ void __launch_bounds__(kPackThreads) wgmma_copy(const __grid_constant__ Copy p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int shift = p.block_shift, pairs = 1 << (2 * shift - 1);
  for (auto i = static_cast<int32_t>(blockIdx.x); i < p.blocks; i += static_cast<int32_t>(gridDim.x)) {
    const BlockRef ref = p.walk.refs[i];
    const int64_t first = int64_t{ref.weight} * pairs;
    const int inside = ref.from == p.last_block ? p.inside : 1 << shift;
    for (auto e = static_cast<int>(threadIdx.x); e < pairs; e += kPackThreads) {
      const int row = e >> (shift - 1), column = (e << 1) & ((1 << shift) - 1);
      uint32_t word = load_pair(p.w + 2 * (first + e), p.w_aligned);
      word = gated(word, p.gates, ref.weight, p.bf16);
      const int left = p.by_in ? (row < inside ? 2 : 0) : inside - column;
      if (left < 2) word = left < 1 ? 0 : word & 0xffff;
      p.to[first + e] = word;
    }
  }
}

Status copy_blocks(const CudaCall& call, const DeviceWalk& walk, const PackedWeights& w, const Tables& to) {
  const CudaProblem& p = call.problem;
  const int64_t last = p.input_blocks() - 1;
  const Copy args{.walk = walk,
                  .w = static_cast<const uint16_t*>(w.w),
                  .gates = w.gates,
                  .bf16 = w.dtype == DType::bf16,
                  .w_aligned = reinterpret_cast<uintptr_t>(w.w) % 4 == 0,
                  .by_in = p.by_in,
                  .blocks = static_cast<int32_t>(p.blocks),
                  .block_shift = __builtin_ctz(static_cast<unsigned>(p.block)),
                  .last_block = static_cast<int32_t>(last),
                  .inside = static_cast<int32_t>(p.inputs - last * p.block),
                  .to = reinterpret_cast<uint32_t*>(to.copy)};
  return cuda::launch({.blocks = std::clamp<int64_t>(p.blocks, 1, int64_t{8} * call.card.multiprocessors),
                       .threads = kPackThreads,
                       .stream = static_cast<cudaStream_t>(call.stream),
                       .overlap = true},
                      wgmma_copy, args);
}

// Calls body(kernel) with the kernel for this kind and block size.
template <class Body>
Status with_pack_kernel(Kind kind, int32_t block, Body body) {
  switch (kind) {
    case Kind::direct: return {};
    case Kind::filled:
      switch (block) {
        case 8: return body(wgmma_pack<Kind::filled, 8>);
        case 16: return body(wgmma_pack<Kind::filled, 16>);
        default: return body(wgmma_pack<Kind::filled, 32>);
      }
    case Kind::patches32: return body(wgmma_pack<Kind::patches32, 32>);
    case Kind::patches16: break;
  }
  return block == 8 ? body(wgmma_pack<Kind::patches16, 8>) : body(wgmma_pack<Kind::patches16, 16>);
}

}  // namespace

Status pack_weights(const Plan& plan, const CudaCall& call, const DeviceWalk& walk, const PackedWeights& w,
                    const Tables& to) {
  const CudaProblem& p = call.problem;
  if (plan.kind == Kind::direct) return copies_w(p) ? copy_blocks(call, walk, w, to) : Status();
  const Pack args{.sources = to.sources,
                  .w = static_cast<const uint16_t*>(w.w),
                  .gates = w.gates,
                  .bf16 = w.dtype == DType::bf16,
                  .w_aligned = reinterpret_cast<uintptr_t>(w.w) % 16 == 0,
                  .to = to.patches,
                  .patches = plan.patches,
                  .inputs = p.inputs,
                  .by_in = p.by_in};
  return with_pack_kernel(plan.kind, p.block, [&](auto kernel) {
    constexpr int64_t kBytes = int64_t{128} * 4 * kAtOnce * kPackThreads / 32;  // bytes of a thread block
    return cuda::launch(
        {.blocks = std::max<int64_t>(1, ceil_div(plan.patches * form_of(plan.kind).patch_bytes(), kBytes)),
         .threads = kPackThreads,
         .stream = static_cast<cudaStream_t>(call.stream),
         .overlap = true},
        kernel, args);
  });
}

Status prepare_pack() {
  BS_RETURN_IF_ERROR(cuda::prepare(wgmma_copy, 0));
  for (auto kind : {Kind::filled, Kind::patches32, Kind::patches16}) {
    for (int32_t block : {8, 16, 32}) {
      BS_RETURN_IF_ERROR(with_pack_kernel(kind, block, [](auto kernel) { return cuda::prepare(kernel, 0); }));
    }
  }
  return {};
}

}  // namespace blocksparse::gemm::wgmma
