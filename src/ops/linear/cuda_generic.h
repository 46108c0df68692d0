// The linear op on any CUDA card, for any problem.
//   fprop, dgrad   y [n, outputs] = f(x [n, inputs] W^T + bias + residual)
//   wgrad          dW[i] = gate_i * dy_out^T x_in, gate gradient <dy_out^T x_in, W[i]>
// Who does what
//   grid      product: a tile of 64 tokens x (up to 64) outputs of one piece for each thread block
//             gradient: 64 inputs x (up to 64) outputs of dW, so 64 / b neighbouring blocks, for each thread block
//   load      all threads copy tiles of 128 bytes of depth, two or three ahead; what is outside of the matrix becomes 0
//   compute   4 warps of 16 rows: mma.sync for bf16 and f16, fused multiply-add for f32 and f64
//   finish    sums go through shared memory, so that memory is written in its order whatever that is
// The depth of a product is the list of blocks laid end to end, b inputs each; that of a gradient is the tokens.
#pragma once

#include "cuda/launch.h"
#include "cuda/multiply.h"
#include "ops/linear/cuda.h"

namespace blocksparse::linear {
namespace {

using cuda::Even;
using cuda::kDepth;
using cuda::kThreads;
using cuda::kTileRows;
using cuda::Place;

// Config: the element type and the outputs of a tile.
template <class T, int N>
struct Generic {
  using Element = T;
  using Sum = SumOf<T>;
  static constexpr int outputs = N;
  static constexpr int stages = N == 64 ? 3 : 4;
  static constexpr int left_elements = cuda::TileShape<T, kTileRows>::elements;
  static constexpr int right_elements = cuda::TileShape<T, N>::elements;
  static constexpr int gates_elements = kDepth<T> / 8;
  static constexpr int stage_bytes =
      (left_elements + right_elements) * static_cast<int>(sizeof(T)) + 64;  // and gates, up to 64 bytes
  static constexpr int pitch = N + 1;                                       // of the sums in shared memory
  static constexpr int shared_bytes = stages * stage_bytes;
  static_assert(gates_elements * sizeof(Sum) <= 64);
  static_assert(kTileRows * pitch * static_cast<int>(sizeof(Sum)) <= shared_bytes, "sums take the place of the stages");
};

template <class K>
struct Stage {
  typename K::Element *left, *right;
  typename K::Sum* gates;

  __device__ Stage(void* shared, int stage) {
    char* begin = static_cast<char*>(shared) + stage * K::stage_bytes;
    left = reinterpret_cast<typename K::Element*>(begin);
    right = left + K::left_elements;
    gates = reinterpret_cast<typename K::Sum*>(right + K::right_elements);
  }
};

struct DeviceMatrix {
  const void* data;
  int64_t token_stride, feature_stride;
  bool aligned;  // rows begin at multiples of 16 bytes

  __device__ bool features_contiguous() const { return feature_stride == 1; }
};

// Of a side of a tile, so that 32 bits will do.
__device__ inline int inside_tile(int64_t left) { return static_cast<int>(min(max(left, int64_t{0}), int64_t{256})); }

__device__ inline bool warp_has_rows(int64_t rows) { return static_cast<int>(threadIdx.x) / 32 * 16 < rows; }

// ---- What becomes of a sum
// -------------------------------------------------------------------------------------------

__device__ inline float activated(Activation activation, float z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return z < 0 ? 0 : z;
    case Activation::gelu: return 0.5f * z * erfcf(z * -0.707106781f);
    case Activation::silu: return z / (1 + expf(-z));
  }
  return z;
}

__device__ inline double activated(Activation activation, double z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return z < 0 ? 0 : z;
    case Activation::gelu: return 0.5 * z * erfc(z * -0.70710678118654752440);
    case Activation::silu: return z / (1 + exp(-z));
  }
  return z;
}

struct Finish {
  DeviceMatrix y, residual;
  const void* bias;
  Activation activation;

  template <class T>
  __device__ void store(int64_t token, int64_t output, SumOf<T> sum) const {
    if (bias != nullptr) sum += widen(static_cast<const T*>(bias)[output]);
    if (residual.data != nullptr) {
      sum +=
          widen(static_cast<const T*>(residual.data)[token * residual.token_stride + output * residual.feature_stride]);
    }
    T* to = static_cast<T*>(const_cast<void*>(y.data)) + token * y.token_stride + output * y.feature_stride;
    *to = narrow<T>(activated(activation, sum));
  }
};

// ---- fprop and dgrad
// -------------------------------------------------------------------------------------------------

struct GenericProduct {
  DeviceWalk walk;
  int32_t block, block_shift;
  int32_t last_block, ragged;  // the last block of inputs, and how many of its inputs there are
  int64_t n, outputs;
  DeviceMatrix x, w;  // w: a block, its rows the outputs ("tokens") and its columns the inputs
  const void* gates;
  Finish finish;
  void* partial;  // Sum [slots][n][block]; null: split rows are walked as a whole
};

// One tile: 64 tokens, K::outputs outputs of a piece.
struct ProductItem {
  Piece piece;
  int64_t token;   // the first
  int32_t output;  // within the block

  template <class K>
  __device__ static bool find(const GenericProduct& p, int64_t item, ProductItem& found) {
    const int64_t pieces = p.walk.counts[0], parts = p.block / K::outputs;
    const int64_t part = item % parts, rest = item / parts;
    found.token = rest / pieces * kTileRows;
    if (found.token >= p.n) return false;
    found.piece = p.walk.pieces[rest % pieces];
    found.output = static_cast<int32_t>(part) * K::outputs;
    return true;
  }
};

// The blocks of a piece laid end to end, from one step of the depth on.
struct BlocksInDepth {
  const BlockRef* refs;
  int32_t left;   // refs from here on
  int32_t inner;  // where in the first block the step begins
  int32_t block, shift;
  int32_t last_block, ragged;  // the last block of inputs, and how many of its inputs there are

  __device__ static BlocksInDepth make(const GenericProduct& p, const Piece& piece, int64_t depth) {
    const auto blocks = static_cast<int32_t>(depth >> p.block_shift);
    return {p.walk.refs + piece.first + blocks,
            piece.last - piece.first - blocks,
            static_cast<int32_t>(depth) & (p.block - 1),
            p.block,
            p.block_shift,
            p.last_block,
            p.ragged};
  }

  // Calls body(ref, inner, inputs left in the block) for the input at `k`; a piece that has ended gives nothing left.
  template <class Body>
  __device__ auto at(int k, Body body) const {
    const int32_t all = inner + k, i = all >> shift, in_block = all & (block - 1);
    const BlockRef ref = i < left ? refs[i] : BlockRef{0, 0};
    const int32_t inside = i < left ? (ref.from == last_block ? ragged : block) - in_block : 0;
    return body(ref, in_block, inside);
  }
};

template <class K>
__device__ void load_product(const GenericProduct& p, const ProductItem& item, int64_t step, const Stage<K>& stage) {
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

template <class K>
__device__ void finish_product(const GenericProduct& p, const ProductItem& item, const typename K::Sum* sums) {
  const bool slice = item.piece.slot >= 0 && p.partial != nullptr;
  const bool by_output = slice || p.finish.y.features_contiguous();
  const int64_t output = int64_t{item.piece.to} * p.block + item.output;
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
__global__ void __launch_bounds__(kThreads) generic_product(const __grid_constant__ GenericProduct p) {
  using T = typename K::Element;
  extern __shared__ uint4 shared[];
  ProductItem item;
  for (int64_t i = blockIdx.x; ProductItem::find<K>(p, i, item); i += gridDim.x) {
    if (p.partial == nullptr && item.piece.slot >= 0) {  // the first slice takes the row, the others nothing
      if (item.piece.first != p.walk.starts[item.piece.to]) continue;
      item.piece.last = p.walk.starts[item.piece.to + 1];
    }
    cuda::Sums<T, K::outputs> sums;
    const int64_t depth = int64_t{item.piece.last - item.piece.first} << p.block_shift;
    cuda::pipeline<K::stages>((depth + kDepth<T> - 1) / kDepth<T>,
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
__global__ void __launch_bounds__(kThreads) generic_combine(const __grid_constant__ GenericProduct p) {
  const int64_t width = p.n * p.block, count = p.walk.counts[1] * width;
  const auto* partial = static_cast<const SumOf<T>*>(p.partial);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const Split split = p.walk.splits[i / width];
    const int64_t inner = i % width, output = int64_t{split.to} * p.block + inner % p.block;
    if (output >= p.outputs) continue;
    SumOf<T> sum = 0;
    for (int32_t slot = 0; slot < split.slots; ++slot) sum += partial[(split.first_slot + slot) * width + inner];
    p.finish.store<T>(inner / p.block, output, sum);
  }
}

// ---- wgrad
// -----------------------------------------------------------------------------------------------------------

struct DeviceTerm {
  const void *x, *dy;
  int64_t n;
  int64_t x_stride, dy_stride;  // that of tokens, or features-first that of features; the other is 1
  bool x_first, dy_first, x_aligned, dy_aligned;
};

static_assert(sizeof(DeviceTerm) == kTermBytes);

struct Terms {
  DeviceTerm term[kTermsByValue];
};

// Terms beyond those that fit into a launch are put into the workspace by launches of their own: nothing is copied from
// the host.
__global__ void generic_keep_terms(const __grid_constant__ Terms terms, DeviceTerm* to, int count) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = terms.term[threadIdx.x];
}

struct GenericGradient {
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

// Neighbouring blocks of one row of W, of which a tile holds whole ones; or a quarter of a block of 128.
struct GradientItem {
  int32_t first, last;    // blocks
  int32_t input, output;  // of a quarter, within the block
};

template <class K>
__device__ void load_gradient(const GenericGradient& g, const GradientItem& item, const DeviceTerm& term, int64_t token,
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

// Calls body(offset in dW, sum) for the elements of block `i` in the tile that lie inside of the matrix, and with 0 for
// those beyond.
template <class K, class Body>
__device__ void for_each_of_block(const GenericGradient& g, const GradientItem& item, int32_t i,
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
__device__ void store_gradient(const GenericGradient& g, const GradientItem& item, int32_t i,
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

// <S, W> of the part of block `i` in the tile, in thread 0: lanes first, then warps, always in the same order.
template <class K>
__device__ typename K::Sum gate_gradient(const GenericGradient& g, const GradientItem& item, int32_t i,
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
__device__ void sum_gradient(const GenericGradient& g, const GradientItem& item, void* shared) {
  using T = typename K::Element;
  cuda::Sums<T, K::outputs> sums;
  for (int i = 0; i < g.terms; ++i) {
    const DeviceTerm& term = g.term(i);
    cuda::pipeline<K::stages>(
        (term.n + kDepth<T> - 1) / kDepth<T>,
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

// Blocks of 128 have four quarters: each is an item, or, where their gates' gradients are added, all are one.
template <class K>
__global__ void __launch_bounds__(kThreads) generic_gradient(const __grid_constant__ GenericGradient g) {
  using Sum = typename K::Sum;
  extern __shared__ uint4 shared[];
  const auto* staged = reinterpret_cast<const Sum*>(shared);
  const int quarters = g.block > kTileRows ? 4 : 1, together = g.dgates == nullptr ? 1 : quarters;
  const int run = max(kTileRows >> g.block_shift, 1);
  for (int64_t i = blockIdx.x; i / (quarters / together) * run < g.blocks; i += gridDim.x) {
    const auto begin = static_cast<int32_t>(i / (quarters / together) * run), end = min(begin + run, g.blocks);
    for (GradientItem item{begin, begin, 0, 0}; item.first < end; item.first = item.last) {
      while (item.last < end && g.out_of[item.last] == g.out_of[item.first]) ++item.last;
      Sum gate_sum[8] = {};  // of up to 8 blocks; more than one only where there are no quarters
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

// ---- Launch
// ----------------------------------------------------------------------------------------------------------

template <class T>
DeviceMatrix matrix_of(const Activations& a) {
  const int64_t rows = a.features_first() ? a.feature_stride : a.token_stride;
  const bool aligned = reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && rows * sizeof(T) % 16 == 0;
  return {a.data, a.token_stride, a.feature_stride, aligned};
}

inline int32_t shift_of(int32_t block) { return __builtin_ctz(static_cast<unsigned>(block)); }

inline cudaStream_t stream_of(const CudaCall& call) { return static_cast<cudaStream_t>(call.stream); }

// body.template operator()<N>() with the outputs of a tile for blocks of that size.
template <class Body>
Status with_outputs(int32_t block, Body body) {
  switch (block) {
    case 8: return body.template operator()<8>();
    case 16: return body.template operator()<16>();
    case 32: return body.template operator()<32>();
    default: return body.template operator()<64>();
  }
}

template <class T>
Status launch_product(const Product& p, const CudaCall& call) {
  const int32_t block = p.layout.block_size;
  const bool split = generic_splits(call.problem);
  const int64_t last_block = (p.x.features - 1) / block;
  const bool w_aligned = reinterpret_cast<uintptr_t>(p.w) % 16 == 0;
  GenericProduct args{.walk = walk_on_device(p.layout, p.by_in),
                      .block = block,
                      .block_shift = shift_of(block),
                      .last_block = static_cast<int32_t>(last_block),
                      .ragged = static_cast<int32_t>(p.x.features - last_block * block),
                      .n = p.x.n,
                      .outputs = p.y.features,
                      .x = matrix_of<T>(p.x),
                      .w = {p.w, p.by_in ? 1 : block, p.by_in ? block : 1, w_aligned},
                      .gates = p.gates,
                      .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation},
                      .partial = split ? call.workspace.data : nullptr};
  BS_RETURN_IF_ERROR(with_outputs(block, [&]<int N>() {
    const int64_t tiles = (p.x.n + kTileRows - 1) / kTileRows;
    const int64_t pieces = call.problem.output_blocks() + call.problem.slots;
    return cuda::launch({.blocks = tiles * pieces * (block / N),
                         .threads = kThreads,
                         .shared_bytes = Generic<T, N>::shared_bytes,
                         .stream = stream_of(call)},
                        generic_product<Generic<T, N>>, args);
  }));
  if (!split) return {};
  const int64_t blocks = std::min<int64_t>(4 * call.card.multiprocessors, p.x.n * block / kThreads + 1);
  return cuda::launch({.blocks = blocks, .threads = kThreads, .stream = stream_of(call)}, generic_combine<T>, args);
}

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
  GenericGradient args{.refs = walk_on_device(g.layout, false).refs,
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
    return cuda::launch({.blocks = (g.layout.blocks + run - 1) / run * quarters,
                         .threads = kThreads,
                         .shared_bytes = Generic<T, N>::shared_bytes,
                         .stream = stream_of(call)},
                        generic_gradient<Generic<T, N>>, args);
  });
}

template <class T>
Status prepare_product() {
  for (int32_t block : {8, 16, 32, 64}) {
    BS_RETURN_IF_ERROR(with_outputs(
        block, [&]<int N>() { return cuda::prepare(generic_product<Generic<T, N>>, Generic<T, N>::shared_bytes); }));
  }
  return cuda::prepare(generic_combine<T>, 0);
}

template <class T>
Status prepare_gradient() {
  for (int32_t block : {8, 16, 32, 64}) {
    BS_RETURN_IF_ERROR(with_outputs(
        block, [&]<int N>() { return cuda::prepare(generic_gradient<Generic<T, N>>, Generic<T, N>::shared_bytes); }));
  }
  return cuda::prepare(generic_keep_terms, 0);
}

template <class T>
CudaProductKernel make_generic_product(DType dtype) {
  return {CudaKernel::generic, dtype, prepare_product<T>, launch_product<T>};
}

template <class T>
CudaGradientKernel make_generic_gradient(DType dtype) {
  return {CudaKernel::generic, dtype, prepare_gradient<T>, launch_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::linear
