// fprop and dgrad on any CUDA card: see tile.cuh.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/generic/tile.cuh"

namespace blocksparse::gemm::generic {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

struct ProductArgs {
  DeviceWalk walk;
  int32_t block, block_shift;
  int32_t last_block, ragged;  // the last block of inputs, and how many inputs it has
  int64_t n, outputs;
  DeviceMatrix x, w;  // w: a block whose rows are outputs ("tokens") and whose columns are inputs
  const void* gates;
  Finish finish;
  void* partial;  // Sum [slots][n][block]; null: split rows are walked as a whole
};

// One tile: 64 tokens and K::outputs outputs of a piece.
struct ProductItem {
  Piece piece;
  int64_t token;   // the first
  int32_t output;  // within the block

  template <class K>
  __device__ static bool find(const ProductArgs& p, int64_t item, ProductItem& found) {
    const int64_t pieces = p.walk.counts[0], parts = p.block / K::outputs;
    const int64_t part = item % parts, rest = item / parts;
    found.token = rest / pieces * kTileRows;
    if (found.token >= p.n) return false;
    found.piece = p.walk.pieces[rest % pieces];
    found.output = static_cast<int32_t>(part) * K::outputs;
    return true;
  }
};

// The blocks of a piece laid end to end, from a step of the depth on.
struct BlocksInDepth {
  const BlockRef* refs;
  int32_t left;   // refs from here on
  int32_t inner;  // where the step begins in the first block
  int32_t block, shift;
  int32_t last_block, ragged;  // the last block of inputs, and how many inputs it has

  __device__ static BlocksInDepth make(const ProductArgs& p, const Piece& piece, int64_t depth) {
    const auto blocks = static_cast<int32_t>(depth >> p.block_shift);
    return {p.walk.refs + piece.first + blocks,
            piece.last - piece.first - blocks,
            static_cast<int32_t>(depth) & (p.block - 1),
            p.block,
            p.block_shift,
            p.last_block,
            p.ragged};
  }

  // Calls body(ref, inner, inputs left in the block) for the input at `k`. After the end of the piece, 0 inputs are
  // left.
  template <class Body>
  __device__ auto at(int k, Body body) const {
    const int32_t all = inner + k, i = all >> shift, in_block = all & (block - 1);
    const BlockRef ref = i < left ? refs[i] : BlockRef{0, 0};
    const int32_t inside = i < left ? (ref.from == last_block ? ragged : block) - in_block : 0;
    return body(ref, in_block, inside);
  }
};

template <class K>
__device__ void load_product(const ProductArgs& p, const ProductItem& item, int64_t step, const Stage<K>& stage) {
  using T = typename K::Element;
  const auto blocks = BlocksInDepth::make(p, item.piece, step * kDepth<T>);
  const auto inputs = [&](int k) {
    return blocks.at(k, [&](BlockRef ref, int32_t inner, int32_t left) -> Place {
      return {(int64_t{ref.from} * p.block + inner) * p.x.feature_stride, left};
    });
  };
  const auto weights = [&](int k) {
    return blocks.at(k, [&](BlockRef ref, int32_t inner, int32_t left) -> Place {
      return {(int64_t{ref.weight} << 2 * p.block_shift) + inner * p.w.feature_stride, left};
    });
  };
  const auto* x = static_cast<const T*>(p.x.data) + item.token * p.x.token_stride;
  const auto* w = static_cast<const T*>(p.w.data) + item.output * p.w.token_stride;
  const auto left = cuda::TileShape<T, kTileRows>::make(stage.left, p.x.features_contiguous());
  const auto right = cuda::TileShape<T, K::outputs>::make(stage.right, p.w.features_contiguous());
  cuda::load_tile<kTileRows>(left, x, p.x.aligned, Even{p.x.token_stride, inside_tile(p.n - item.token)}, inputs);
  cuda::load_tile<K::outputs>(right, w, p.w.aligned, Even{p.w.token_stride, K::outputs}, weights);
  if (p.gates != nullptr && threadIdx.x < K::gates_elements) {
    const auto* gates = static_cast<const SumOf<T>*>(p.gates);
    stage.gates[threadIdx.x] =
        blocks.at(static_cast<int>(threadIdx.x) * 8,
                  [&](BlockRef ref, int32_t, int32_t left) -> SumOf<T> { return left > 0 ? gates[ref.weight] : 0; });
  }
}

// The epilogue of a gated linear unit: half as many results as sums.
template <class K>
__device__ void finish_glu(const ProductArgs& p, int64_t first_token, int64_t output, const typename K::Sum* sums) {
  constexpr int kFeatures = K::outputs / 2;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kFeatures; i += kThreads) {
    const int row = i / kFeatures, column = gate_column(i % kFeatures);
    const int64_t token = first_token + row;
    if (token >= p.n || output + column >= p.outputs) continue;
    const typename K::Sum* gate = sums + row * K::pitch + column;
    p.finish.store_glu<typename K::Element>(token, output + column, gate[0], gate[kInterleaved]);
  }
}

template <class K>
__device__ void finish_product(const ProductArgs& p, const ProductItem& item, const typename K::Sum* sums) {
  const bool slice = item.piece.slot >= 0 && p.partial != nullptr;
  const bool by_output = slice || p.finish.y.features_contiguous();
  const int64_t output = int64_t{item.piece.to} * p.block + item.output;
  if constexpr (K::outputs >= 2 * kInterleaved) {
    if (p.finish.hidden > 0 && !slice) return finish_glu<K>(p, item.token, output, sums);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * K::outputs; i += kThreads) {
    const int row = by_output ? i / K::outputs : i % kTileRows, column = by_output ? i % K::outputs : i / kTileRows;
    const int64_t token = item.token + row;
    if (token >= p.n || output + column >= p.outputs) continue;
    const typename K::Sum sum = sums[row * K::pitch + column];
    if (slice) {
      auto* partial = static_cast<typename K::Sum*>(p.partial);
      partial[(item.piece.slot * p.n + token) * p.block + item.output + column] = sum;
    } else {
      p.finish.store<typename K::Element>(token, output + column, sum);
    }
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads) generic_product(const __grid_constant__ ProductArgs p) {
  using T = typename K::Element;
  extern __shared__ uint4 shared[];
  ProductItem item;
  for (int64_t i = blockIdx.x; ProductItem::find<K>(p, i, item); i += gridDim.x) {
    if (p.partial == nullptr && item.piece.slot >= 0) {  // the first slice takes the whole row, the others do nothing
      if (item.piece.first != p.walk.starts[item.piece.to]) continue;
      item.piece.last = p.walk.starts[item.piece.to + 1];
    }
    cuda::Sums<T, K::outputs> sums;
    const int64_t depth = int64_t{item.piece.last - item.piece.first} << p.block_shift;
    cuda::pipeline<K::stages>(
        ceil_div(depth, kDepth<T>),
        [&](int64_t step, int stage) { load_product<K>(p, item, step, Stage<K>(shared, stage)); },
        [&](int stage) {
          const Stage<K> s(shared, stage);
          if (!warp_has_rows(p.n - item.token)) return;
          sums.add(cuda::TileShape<T, kTileRows>::make(s.left, p.x.features_contiguous()),
                   cuda::TileShape<T, K::outputs>::make(s.right, p.w.features_contiguous()),
                   p.gates == nullptr ? nullptr : s.gates);
        });
    auto* staged = reinterpret_cast<typename K::Sum*>(shared);
    sums.for_each([&](int row, int column, typename K::Sum sum) { staged[row * K::pitch + column] = sum; });
    __syncthreads();
    finish_product<K>(p, item, staged);
    __syncthreads();
  }
}

// Adds the slices of split rows in the order of slots.
template <class T>
__global__ void __launch_bounds__(kThreads) generic_combine(const __grid_constant__ ProductArgs p) {
  const int64_t width = p.n * p.block, count = p.walk.counts[1] * width;
  const auto* partial = static_cast<const SumOf<T>*>(p.partial);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const Split split = p.walk.splits[i / width];
    const int64_t inner = i % width, output = int64_t{split.to} * p.block + inner % p.block;
    if (output >= p.outputs) continue;
    const auto sum_at = [&](int64_t at) {
      SumOf<T> sum = 0;
      for (int32_t slot = 0; slot < split.slots; ++slot) sum += partial[(split.first_slot + slot) * width + at];
      return sum;
    };
    if (p.finish.hidden == 0) p.finish.store<T>(inner / p.block, output, sum_at(inner));
    else if (is_gate(output)) {
      p.finish.store_glu<T>(inner / p.block, output, sum_at(inner), sum_at(inner + kInterleaved));
    }
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T>
Status launch_product(const Product& p, const CudaCall& call) {
  const int32_t block = p.layout.block_size;
  const bool split = splits(call.problem);
  const int64_t last_block = (p.x.features - 1) / block;
  const bool w_aligned = reinterpret_cast<uintptr_t>(p.w) % 16 == 0;
  ProductArgs args{
      .walk = walk_on_device(p.layout, p.by_in),
      .block = block,
      .block_shift = shift_of(block),
      .last_block = static_cast<int32_t>(last_block),
      .ragged = static_cast<int32_t>(p.x.features - last_block * block),
      .n = p.x.n,
      .outputs = p.outputs(),
      .x = matrix_of<T>(p.x),
      .w = {p.w, p.by_in ? 1 : block, p.by_in ? block : 1, w_aligned},
      .gates = p.gates,
      .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation, p.glu ? p.y.features : 0},
      .partial = split ? call.workspace.data : nullptr};
  BS_RETURN_IF_ERROR(with_outputs(block, [&]<int N>() {
    const int64_t tiles = ceil_div(p.x.n, kTileRows);
    const int64_t pieces = call.problem.output_blocks() + call.problem.slots;
    return cuda::launch({.blocks = tiles * pieces * (block / N),
                         .threads = kThreads,
                         .shared_bytes = Kernel<T, N>::shared_bytes,
                         .stream = stream_of(call)},
                        generic_product<Kernel<T, N>>, args);
  }));
  if (!split) return {};
  const int64_t blocks = std::min<int64_t>(4 * call.card.multiprocessors, p.x.n * block / kThreads + 1);
  return cuda::launch({.blocks = blocks, .threads = kThreads, .stream = stream_of(call)}, generic_combine<T>, args);
}

template <class T>
Status prepare_product() {
  for (int32_t block : {8, 16, 32, 64}) {
    BS_RETURN_IF_ERROR(with_outputs(
        block, [&]<int N>() { return cuda::prepare(generic_product<Kernel<T, N>>, Kernel<T, N>::shared_bytes); }));
  }
  return cuda::prepare(generic_combine<T>, 0);
}

}  // namespace
}  // namespace blocksparse::gemm::generic
