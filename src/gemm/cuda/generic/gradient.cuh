// wgrad on any CUDA card: see tile.cuh.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/generic/tile.cuh"

namespace blocksparse::gemm::generic {
namespace {

struct DeviceTerm {
  const void *x, *dy;
  int64_t n;
  int64_t x_stride, dy_stride;  // stride of tokens (features-last) or of features (features-first); the other stride is
                                // 1
  bool x_first, dy_first, x_aligned, dy_aligned;
};

static_assert(sizeof(DeviceTerm) == kTermBytes);

struct Terms {
  DeviceTerm term[kTermsByValue];
};

// Stores terms that do not fit into a launch's arguments. Each such launch writes some of them to the workspace, so
// nothing is copied from the host.
__global__ void generic_keep_terms(const __grid_constant__ Terms terms, DeviceTerm* to, int count) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = terms.term[threadIdx.x];
}

struct GradientArgs {
  const BlockRef* refs;
  const int32_t* out_of;
  int32_t blocks, block, block_shift;
  int64_t out_features, in_features;
  const void *w, *gates;
  void *dw, *dgates;
  bool dw_is_wide, accumulate;
  int32_t terms;
  const DeviceTerm* more;  // terms from kTermsByValue on
  Terms first;

  __device__ const DeviceTerm& term(int i) const { return i < kTermsByValue ? first.term[i] : more[i - kTermsByValue]; }
};

// Neighbouring blocks of one row of W, whole ones, or a quarter of a block of 128.
struct GradientItem {
  int32_t first, last;    // blocks
  int32_t input, output;  // begin of the quarter within the block
};

template <class K>
__device__ void load_gradient(const GradientArgs& g, const GradientItem& item, const DeviceTerm& term, int64_t token,
                              const Stage<K>& stage) {
  using T = typename K::Element;
  const int64_t row = int64_t{g.out_of[item.first]} * g.block + item.output;
  const int64_t x_feature = term.x_first ? term.x_stride : 1, x_token = term.x_first ? 1 : term.x_stride;
  const int64_t dy_feature = term.dy_first ? term.dy_stride : 1, dy_token = term.dy_first ? 1 : term.dy_stride;
  const auto inputs = [&](int i) -> Place {
    const int32_t block = item.first + (i >> g.block_shift);
    if (block >= item.last) return {0, 0};
    const int32_t inner = (i & (g.block - 1)) + item.input;
    const int64_t column = int64_t{g.refs[block].from} * g.block + inner;
    return {column * x_feature, min(g.block - inner, inside_tile(g.in_features - column))};
  };
  const auto* x = static_cast<const T*>(term.x) + token * x_token;
  const auto* dy = static_cast<const T*>(term.dy) + row * dy_feature + token * dy_token;
  const int tokens = inside_tile(term.n - token);
  const auto left = cuda::TileShape<T, kTileRows>::make(stage.left, term.x_first);
  const auto right = cuda::TileShape<T, K::outputs>::make(stage.right, term.dy_first);
  cuda::load_tile<kTileRows>(left, x, term.x_aligned, inputs, Even{x_token, tokens});
  cuda::load_tile<K::outputs>(right, dy, term.dy_aligned, Even{dy_feature, inside_tile(g.out_features - row)},
                              Even{dy_token, tokens});
}

// Calls body(offset in dW, inside, sum) for every element of block `i` in the tile. Elements outside the matrix have
// inside = false.
template <class K, class Body>
__device__ void for_each_of_block(const GradientArgs& g, const GradientItem& item, int32_t i,
                                  const typename K::Sum* sums, Body body) {
  const int width = min(g.block, kTileRows), row = (i - item.first) * width;
  const int64_t output = int64_t{g.out_of[i]} * g.block, input = int64_t{g.refs[i].from} * g.block;
  for (int e = static_cast<int>(threadIdx.x); e < width * K::outputs; e += kThreads) {
    const int o = e / width, k = e % width;
    const bool inside = output + item.output + o < g.out_features && input + item.input + k < g.in_features;
    body(((int64_t{i} << g.block_shift) + item.output + o << g.block_shift) + item.input + k, inside,
         sums[(row + k) * K::pitch + o]);
  }
}

template <class K>
__device__ void store_gradient(const GradientArgs& g, const GradientItem& item, int32_t i,
                               const typename K::Sum* sums) {
  using T = typename K::Element;
  using Sum = typename K::Sum;
  const Sum gate = g.gates == nullptr ? 1 : static_cast<const Sum*>(g.gates)[i];
  for_each_of_block<K>(g, item, i, sums, [&](int64_t at, bool inside, Sum sum) {
    const Sum value = inside && gate != 0 ? gate * sum : 0;
    if (g.accumulate && !inside) return;
    if (g.dw_is_wide) {
      Sum& to = static_cast<Sum*>(g.dw)[at];
      to = g.accumulate ? to + value : value;
    } else {
      T& to = static_cast<T*>(g.dw)[at];
      to = narrow<T>(g.accumulate ? widen(to) + value : value);
    }
  });
}

// <S, W> of the part of block `i` in the tile, in thread 0. Lanes are added first, then warps, always in one order.
template <class K>
__device__ typename K::Sum gate_gradient(const GradientArgs& g, const GradientItem& item, int32_t i,
                                         const typename K::Sum* sums) {
  using Sum = typename K::Sum;
  __shared__ Sum of_warp[kThreads / 32];
  Sum mine = 0;
  for_each_of_block<K>(g, item, i, sums, [&](int64_t at, bool inside, Sum sum) {
    if (inside) mine += sum * widen(static_cast<const typename K::Element*>(g.w)[at]);
  });
  for (int step = 16; step > 0; step /= 2) mine += __shfl_down_sync(0xffffffff, mine, step);
  __syncthreads();  // what of_warp held has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Sum all = 0;
  for (const Sum warp : of_warp) all += warp;
  return all;
}

template <class K>
__device__ void sum_gradient(const GradientArgs& g, const GradientItem& item, void* shared) {
  using T = typename K::Element;
  cuda::Sums<T, K::outputs> sums;
  for (int i = 0; i < g.terms; ++i) {
    const DeviceTerm& term = g.term(i);
    cuda::pipeline<K::stages>(
        ceil_div(term.n, kDepth<T>),
        [&](int64_t step, int stage) { load_gradient<K>(g, item, term, step * kDepth<T>, Stage<K>(shared, stage)); },
        [&](int stage) {
          const Stage<K> s(shared, stage);
          if (!warp_has_rows(int64_t{item.last - item.first} << g.block_shift)) return;
          sums.add(cuda::TileShape<T, kTileRows>::make(s.left, term.x_first),
                   cuda::TileShape<T, K::outputs>::make(s.right, term.dy_first), nullptr);
        });
  }
  auto* staged = static_cast<typename K::Sum*>(shared);
  sums.for_each([&](int row, int column, typename K::Sum sum) { staged[row * K::pitch + column] = sum; });
  __syncthreads();
}

// A block of 128 has four quarters. Each is an item of its own, unless its gate's gradient is wanted: then all four are
// one item.
template <class K>
__global__ void __launch_bounds__(kThreads) generic_gradient(const __grid_constant__ GradientArgs g) {
  using Sum = typename K::Sum;
  extern __shared__ uint4 shared[];
  const auto* staged = reinterpret_cast<const Sum*>(shared);
  const int quarters = g.block > kTileRows ? 4 : 1, together = g.dgates == nullptr ? 1 : quarters;
  const int run = max(kTileRows >> g.block_shift, 1);
  for (int64_t i = blockIdx.x; i / (quarters / together) * run < g.blocks; i += gridDim.x) {
    const auto begin = static_cast<int32_t>(i / (quarters / together) * run), end = min(begin + run, g.blocks);
    for (GradientItem item{begin, begin, 0, 0}; item.first < end; item.first = item.last) {
      while (item.last < end && g.out_of[item.last] == g.out_of[item.first]) ++item.last;
      Sum gate_sum[8] = {};  // of up to 8 blocks; several blocks only if there are no quarters
      for (int q = 0; q < together; ++q) {
        const int quarter = together == 1 ? static_cast<int>(i % quarters) : q;
        item.output = quarter / 2 * kTileRows;
        item.input = quarter % 2 * kTileRows;
        sum_gradient<K>(g, item, shared);
        for (int32_t block = item.first; block < item.last; ++block) {
          store_gradient<K>(g, item, block, staged);
          if (g.dgates != nullptr) gate_sum[block - item.first] += gate_gradient<K>(g, item, block, staged);
        }
        __syncthreads();
      }
      if (g.dgates == nullptr || threadIdx.x != 0) continue;
      for (int32_t block = item.first; block < item.last; ++block) {
        Sum& to = static_cast<Sum*>(g.dgates)[block];
        to = (g.accumulate ? to : 0) + gate_sum[block - item.first];
      }
    }
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T>
DeviceTerm term_of(const GradTerm& term) {
  const auto stride = [](const Activations& a) { return a.features_first() ? a.feature_stride : a.token_stride; };
  return {.x = term.x.data,
          .dy = term.dy.data,
          .n = term.x.n,
          .x_stride = stride(term.x),
          .dy_stride = stride(term.dy),
          .x_first = term.x.features_first(),
          .dy_first = term.dy.features_first(),
          .x_aligned = matrix_of<T>(term.x).aligned,
          .dy_aligned = matrix_of<T>(term.dy).aligned};
}

template <class T>
Status launch_gradient(const WeightGradient& g, const CudaCall& call) {
  const int32_t block = g.layout.block_size;
  auto* more = static_cast<DeviceTerm*>(call.workspace.data);
  GradientArgs args{.refs = walk_on_device(g.layout, false).refs,
                    .out_of = out_of_on_device(g.layout),
                    .blocks = static_cast<int32_t>(g.layout.blocks),
                    .block = block,
                    .block_shift = shift_of(block),
                    .out_features = g.layout.out_features,
                    .in_features = g.layout.in_features,
                    .w = g.w,
                    .gates = g.gates,
                    .dw = g.dw,
                    .dgates = g.dgates,
                    .dw_is_wide = g.dw_dtype == sum_dtype(g.dtype),
                    .accumulate = g.accumulate,
                    .terms = 0,
                    .more = more,
                    .first = {}};
  Terms rest{};
  const auto keep = [&](int count) {
    const auto before = args.terms - kTermsByValue - count;
    return cuda::launch({.threads = kTermsByValue, .stream = stream_of(call)}, generic_keep_terms, rest, more + before,
                        count);
  };
  for (size_t i = 0; i < g.pairs.size(); ++i) {
    const GradTerm term = g.term(i);
    if (term.x.n == 0) continue;
    Terms& terms = args.terms < kTermsByValue ? args.first : rest;
    terms.term[args.terms++ % kTermsByValue] = term_of<T>(term);
    if (args.terms > kTermsByValue && args.terms % kTermsByValue == 0) BS_RETURN_IF_ERROR(keep(kTermsByValue));
  }
  if (args.terms > kTermsByValue && args.terms % kTermsByValue != 0) {
    BS_RETURN_IF_ERROR(keep(args.terms % kTermsByValue));
  }
  return with_outputs(block, [&]<int N>() {
    const int64_t quarters = block > kTileRows && g.dgates == nullptr ? 4 : 1;
    const int64_t run = std::max(kTileRows / block, 1);
    return cuda::launch({.blocks = ceil_div(g.layout.blocks, run) * quarters,
                         .threads = kThreads,
                         .shared_bytes = Kernel<T, N>::shared_bytes,
                         .stream = stream_of(call)},
                        generic_gradient<Kernel<T, N>>, args);
  });
}

template <class T>
Status prepare_gradient() {
  for (int32_t block : {8, 16, 32, 64}) {
    BS_RETURN_IF_ERROR(with_outputs(
        block, [&]<int N>() { return cuda::prepare(generic_gradient<Kernel<T, N>>, Kernel<T, N>::shared_bytes); }));
  }
  return cuda::prepare(generic_keep_terms, 0);
}

}  // namespace
}  // namespace blocksparse::gemm::generic
