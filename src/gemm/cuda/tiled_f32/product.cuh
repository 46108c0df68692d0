// y = f(x W^T + bias + residual) in f32 for many tokens, and dgrad likewise: see tiled.cuh.
// Who does what
//   grid      a thread block for a tile of 128 tokens x 128 outputs: its 128 / b rows of blocks share their x
//   load      cp.async, two stages of 32 inputs ahead: x, and those blocks that exist
//   compute   4 warps of 32 tokens x 128 outputs; a missing block costs a test
//   finish    sums go through shared memory, so that results are stored in the order of memory
// A small kernel lists what a tile walks before every call: tables.cu.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/tiled_f32/tile.cuh"

namespace blocksparse::gemm::tiled_f32 {
namespace {

struct ProductArgs {
  Walk walk;
  const float *x, *w;
  int64_t x_token;  // elements from token to token
  int32_t n, inputs, outputs, input_blocks, block;
  int32_t groups;  // tiles of outputs
  bool vectors;    // y is stored 4 outputs at a time
  bool plain;      // sums are stored as they are: no bias, residual or activation
  Finish finish;
};

// ---- Load -----------------------------------------------------------------------------------------------------------

template <class K>
struct Item {
  const int32_t *list, *weights;
  int32_t entries, steps, whole_steps;  // whole_steps: steps whose inputs all exist
  int32_t token, output;                // the first
  bool whole_tokens;
  int rows_shift, parts_shift;  // of rows of blocks in a tile, and of stages in a block of 64 or 128

  __device__ explicit Item(const ProductArgs& p) {
    const int group = static_cast<int>(blockIdx.x) % p.groups;
    const int block_shift = 31 - __clz(p.block);
    rows_shift = 7 - block_shift;
    parts_shift = K::segments == 1 ? block_shift - 5 : 0;
    entries = p.walk.counts[group];
    list = p.walk.inputs + int64_t{group} * p.input_blocks;
    weights = p.walk.weights + (int64_t{group} * p.input_blocks << rows_shift);
    steps = K::segments == 1 ? entries << parts_shift : ceil_div(entries, K::segments);
    whole_steps = steps;
    if (p.inputs % p.block != 0 && entries > 0 && list[entries - 1] == p.input_blocks - 1) {
      whole_steps = K::segments == 1 ? steps - (1 << parts_shift) : steps - 1;
    }
    token = static_cast<int32_t>(blockIdx.x) / p.groups * kTokens;
    whole_tokens = token + kTokens <= p.n;
    output = group * kOutputs;
  }
  __device__ int part(int step) const { return step & ((1 << parts_shift) - 1); }
};

// The notes of a step: for each patch 1 + its block, or 0 for none; and the inputs.
template <class K>
__device__ inline void load_notes(const Item<K>& item, int step, uint32_t note) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= K::words + K::segments) return;
  if constexpr (K::segments == 1) {
    const int entry = step >> item.parts_shift;
    const int32_t* from =
        i < K::words ? item.weights + (int64_t{entry} << item.rows_shift) + (i >> item.parts_shift) : item.list + entry;
    ptx::cp_async_4(note + 4 * i, from, 4);
  } else {
    const int entry = step * K::segments + (i < K::words ? i / K::patches : i - K::words);
    const bool there = entry < item.entries;
    const int32_t* from =
        i < K::words ? item.weights + int64_t{entry} * K::patches + i % K::patches : item.list + entry;
    ptx::cp_async_4(note + 4 * i, there ? from : item.list, there ? 4 : 0);
  }
}

// Segments after the last copy block 0, which nobody reads.
template <class K>
__device__ inline void load_x(const ProductArgs& p, const Item<K>& item, int step, uint32_t note, uint32_t stage) {
  constexpr int kVectors = K::inner / 4, kRows = kThreads / kVectors;  // vectors of a row; rows at a time
  const int row = static_cast<int>(threadIdx.x) / kVectors, v = static_cast<int>(threadIdx.x) % kVectors;
  const bool whole = item.whole_tokens && step < item.whole_steps;
#pragma unroll
  for (int s = 0; s < K::segments; ++s) {
    const int input = note_word(note, K::words + s) * p.block + item.part(step) * K::inner + 4 * v;
    const uint32_t to = stage + s * (kTokens * K::inner * 4) + place_in_rows<K::inner>(row, v);
    static_assert(kRows % 16 == 0);  // rows that far apart have vectors at equal places
    if (whole) {
      const float* from = p.x + (item.token + row) * p.x_token + input;
#pragma unroll
      for (int i = 0; i < kTokens / kRows; ++i, from += kRows * p.x_token) {
        ptx::cp_async_16_if(true, to + i * kRows * K::inner * 4, from);
      }
    } else {
      const int bytes = min(max(p.inputs - input, 0), 4) * 4;
      const float* x = p.x + (bytes > 0 ? input : 0);
#pragma unroll 1
      for (int i = 0; i < kTokens / kRows; ++i) {
        const float* from = x + min(item.token + row + i * kRows, p.n - 1) * p.x_token;
        ptx::cp_async_16_at(to + i * kRows * K::inner * 4, from, bytes);
      }
    }
  }
}

// A patch is 32 outputs x 32 inputs of a block of 64 or 128, otherwise a block.
template <class K>
__device__ inline void load_w(const ProductArgs& p, const Item<K>& item, int step, uint32_t note, uint32_t stage) {
  constexpr int kVectors = K::inner / 4, kOfPatch = K::inner * kVectors;
  constexpr int kEach = kOfPatch > kThreads ? kOfPatch / kThreads : 1;     // vectors of a patch for each thread
  constexpr int kPatches = kOfPatch > kThreads ? 1 : kThreads / kOfPatch;  // patches at a time
  const int inside = static_cast<int>(threadIdx.x) % (kThreads / kPatches);
  const int row = inside / kVectors, v = inside % kVectors, along = item.part(step) * K::inner;
  int place = 0;
  if constexpr (!K::by_in) place = place_in_rows<K::inner>(row, v);
  else if constexpr (K::inner == 8) place = place_in_small_columns(row, v);
  else place = place_in_columns<K::inner>(row, v);
  const float* base = p.w + (K::by_in ? (along + row) * p.block + 4 * v : row * p.block + along + 4 * v);
  const bool whole = step < item.whole_steps;
#pragma unroll
  for (int i = 0; i < K::words / kPatches; ++i) {
    const int patch = i * kPatches + static_cast<int>(threadIdx.x) / (kThreads / kPatches);
    const int weight = note_word(note, patch);
    const int across = K::segments == 1 ? (patch & ((1 << item.parts_shift) - 1)) * K::inner : 0;
    const float* from = base + int64_t{weight - 1} * (p.block * p.block) + (K::by_in ? across : across * p.block);
    const uint32_t to = stage + K::x_bytes + patch * K::patch_bytes + place;
    int bytes = 16;
    if (!whole) {
      const int input = note_word(note, K::words + patch / K::patches) * p.block + along + (K::by_in ? row : 4 * v);
      const int left = min(max(p.inputs - input, 0), 4);
      bytes = K::by_in ? (left > 0 ? 16 : 0) : left * 4;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (whole) {
        ptx::cp_async_16_if(weight > 0, to + k * 16 * K::inner * 4, from + k * 16 * p.block);
      } else if (weight > 0) {
        const bool there = !K::by_in || p.inputs > note_word(note, K::words) * p.block + along + row + k * 16;
        ptx::cp_async_16_at(to + k * 16 * K::inner * 4, from + k * 16 * p.block, kEach == 1 || there ? bytes : 0);
      }
    }
  }
}

// ---- Finish ---------------------------------------------------------------------------------------------------------

template <class K>
__device__ inline void finish_product(const ProductArgs& p, const Item<K>& item, const float* staged) {
  const int thread = static_cast<int>(threadIdx.x);
  if (p.vectors) {
#pragma unroll 4
    for (int i = thread; i < kTokens * kOutputs / 4; i += kThreads) {
      const int token = item.token + i / (kOutputs / 4), column = i % (kOutputs / 4) * 4;
      const int output = item.output + column;
      if (token >= p.n || output >= p.outputs) continue;
      const float4 sum = *reinterpret_cast<const float4*>(staged + i / (kOutputs / 4) * K::pitch + column);
      if (p.plain && output + 4 <= p.outputs) {
        *reinterpret_cast<float4*>(p.finish.at<float>(token, output)) = sum;
      } else if (output + 4 <= p.outputs) {
        const float4 y = {p.finish.value<float>(token, output, sum.x), p.finish.value<float>(token, output + 1, sum.y),
                          p.finish.value<float>(token, output + 2, sum.z),
                          p.finish.value<float>(token, output + 3, sum.w)};
        *reinterpret_cast<float4*>(p.finish.at<float>(token, output)) = y;
      } else {
        const float rest[3] = {sum.x, sum.y, sum.z};
        for (int k = 0; k < p.outputs - output; ++k) p.finish.store<float>(token, output + k, rest[k]);
      }
    }
    return;
  }
  const bool by_output = p.finish.y.features_contiguous();
  for (int i = thread; i < kTokens * kOutputs; i += kThreads) {
    const int row = by_output ? i / kOutputs : i % kTokens;
    const int column = by_output ? i % kOutputs : i / kTokens;
    const int token = item.token + row, output = item.output + column;
    if (token < p.n && output < p.outputs) p.finish.store<float>(token, output, staged[row * K::pitch + column]);
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads, 2) tiled_f32_product(const __grid_constant__ ProductArgs p) {
  extern __shared__ float4 shared[];
  const uint32_t stages = ptx::shared_address(shared), notes = stages + K::stages * K::stage_bytes;
  const Item<K> item(p);
  std::conditional_t<K::tf32, Tf32Sums<K>, F32Sums<K>> sums;
  const auto note_of = [&](int step) { return notes + step % K::notes * K::note_bytes; };
  constexpr int kAhead = K::stages - 1;
  for (int step = 0; step < min(2 * kAhead, item.steps); ++step) load_notes<K>(item, step, note_of(step));
  ptx::cp_async_commit();
  wait_for_stage<0>();
  // Step i + kAhead is copied while step i is computed. Its notes came kAhead steps before.
#pragma unroll 1
  for (int i = -kAhead; i < item.steps; ++i) {
    if (i >= 0) wait_for_stage<K::stages - 2>();
    const int ahead = i + kAhead;
    if (ahead < item.steps) {
      const uint32_t stage = stages + ahead % K::stages * K::stage_bytes, note = note_of(ahead);
      load_x<K>(p, item, ahead, note, stage);
      load_w<K>(p, item, ahead, note, stage);
      if (i >= 0 && ahead + kAhead < item.steps) load_notes<K>(item, ahead + kAhead, note_of(ahead + kAhead));
    }
    ptx::cp_async_commit();
    if (i >= 0) sums.add(Patches<K>(note_of(i)), stages + i % K::stages * K::stage_bytes);
  }
  wait_for_stage<0>();
  auto* staged = reinterpret_cast<float*>(shared);
  sums.for_each([&](int token, int output, float sum) { staged[token * K::pitch + output] = sum; });
  __syncthreads();
  finish_product<K>(p, item, staged);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <bool Tf32, class Body>
Status with_kernel(int32_t block, bool by_in, Body body) {
  const auto with_inner = [&]<int Inner>() {
    return by_in ? body.template operator()<Kernel<Inner, true, Tf32>>()
                 : body.template operator()<Kernel<Inner, false, Tf32>>();
  };
  switch (block) {
    case 8: return with_inner.template operator()<8>();
    case 16: return with_inner.template operator()<16>();
    default: return with_inner.template operator()<32>();
  }
}

template <bool Tf32>
Status launch_product(const Product& p, const CudaCall& call) {
  const DeviceMatrix y = matrix_of<float>(p.y);
  const ProductArgs args{.walk = walk_in(call.problem, call.workspace.data),
                         .x = static_cast<const float*>(p.x.data),
                         .w = static_cast<const float*>(p.w),
                         .x_token = p.x.token_stride,
                         .n = static_cast<int32_t>(p.x.n),
                         .inputs = static_cast<int32_t>(p.x.features),
                         .outputs = static_cast<int32_t>(p.y.features),
                         .input_blocks = static_cast<int32_t>(call.problem.input_blocks()),
                         .block = p.layout.block_size,
                         .groups = static_cast<int32_t>(groups_of(call.problem)),
                         .vectors = y.aligned && !p.y.features_first(),
                         .plain = without_epilogue(p),
                         .finish = {y, matrix_of<float>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(make_walk(p, call));
  return with_kernel<Tf32>(p.layout.block_size, p.by_in, [&]<class K>() {
    return cuda::launch({.blocks = ceil_div(p.x.n, kTokens) * args.groups,
                         .threads = kThreads,
                         .shared_bytes = K::shared_bytes,
                         .stream = stream_of(call)},
                        tiled_f32_product<K>, args);
  });
}

template <bool Tf32>
Status prepare_product() {
  for (int32_t block : {8, 16, 32}) {
    for (bool by_in : {false, true}) {
      BS_RETURN_IF_ERROR(with_kernel<Tf32>(
          block, by_in, [&]<class K>() { return cuda::prepare_for_many(tiled_f32_product<K>, K::shared_bytes); }));
    }
  }
  return {};
}

}  // namespace
}  // namespace blocksparse::gemm::tiled_f32
