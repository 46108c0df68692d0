// wgrad on any CUDA card: see tile.cuh.
#pragma once

#include "core/ceil_div.h"
#include "ops/conv/cuda/generic/product.cuh"

namespace blocksparse::conv {
namespace {

struct GenericGradient {
  const BlockRef* refs;
  const int32_t* out_of;
  int32_t blocks, block, block_shift, taps;
  DeviceGather gather;
  bool gathers_rows;
  DeviceImages rows, columns;
  const void *w, *gates;
  void *dw, *dgates;
  bool dw_is_wide, accumulate;
  int32_t slices;  // of the tokens
  void* partial;   // sums of each slice, [slices] like dW; null: there is one slice

  __device__ const DeviceImages& plain() const { return gathers_rows ? columns : rows; }
  __device__ int64_t tokens() const { return plain().n * plain().pixels(); }
};

// The blocks of a tile: neighbours of one row of W at one tap, or a quarter of a block of 128.
struct GradientItem {
  int32_t first, last;    // blocks
  int32_t input, output;  // where a quarter begins within the block
  int32_t tap;
  int32_t slice;
};

struct Channels {
  int32_t first;  // of the images
  int left;       // channels from there on, in the block and in the images
};

// Loads a tile (across: channels, depth: pixels from `token` on). channels_at(i) is the place of channel i.
template <int Across, class T, class ChannelsAt>
__device__ inline void load_pixels(const GenericGradient& g, const DeviceImages& images, bool gathered,
                                   const DeviceTap& tap, int64_t token, const cuda::Tile<T>& tile,
                                   ChannelsAt channels_at) {
  const auto pixel_at = [&](int k) -> Place {
    if (token + k >= g.tokens()) return {0, 0};
    int64_t image = 0;
    const DevicePixel pixel = g.plain().pixel(token + k, image);
    if (!gathered) return {images.offset(image, pixel), 1};
    DevicePixel from{};
    if (!g.gather.source(pixel, tap, images.size, from)) return {0, 0};
    return {images.offset(image, from), 1};
  };
  const T* base = static_cast<const T*>(images.data);
  if (images.in_vectors) {
    const auto across = [&](int i) -> Place {
      const Channels c = channels_at(i);
      return {c.first, c.left};
    };
    cuda::load_tile<Across>(tile, base, true, across, pixel_at);
    return;
  }
  const int k = static_cast<int>(threadIdx.x) % kDepth<T>;  // neighbouring threads have neighbouring pixels
  const Place pixel = pixel_at(k);
  for (int i = static_cast<int>(threadIdx.x) / kDepth<T>; i < Across; i += kThreads / kDepth<T>) {
    const Channels c = channels_at(i);
    const int32_t channel = pixel.left > 0 && c.left > 0 ? images.channel(c.first) : -1;
    *tile.at(i, k) = images.has(channel) ? base[pixel.offset + channel * images.channel_stride] : T{};
  }
}

template <class K>
__device__ void load_gradient(const GenericGradient& g, const GradientItem& item, int64_t token,
                              const Stage<K>& stage) {
  using T = typename K::Element;
  const DeviceTap tap = g.gather.tap(item.tap);
  const auto inputs = [&](int i) -> Channels {
    const int32_t block = item.first + (i >> g.block_shift);
    if (block >= item.last) return {0, 0};
    const int32_t inner = (i & (g.block - 1)) + item.input, channel = g.refs[block].from * g.block + inner;
    return {channel, min(g.block - inner, g.columns.channels - channel)};
  };
  const auto outputs = [&](int i) -> Channels {
    const int32_t channel = g.out_of[item.first] * g.block + item.output + i;
    return {channel, min(g.block - item.output - i, g.rows.channels - channel)};
  };
  const auto left = cuda::TileShape<T, kTileRows>::make(stage.left, false);
  const auto right = cuda::TileShape<T, K::outputs>::make(stage.right, false);
  load_pixels<kTileRows>(g, g.columns, !g.gathers_rows, tap, token, left, inputs);
  load_pixels<K::outputs>(g, g.rows, g.gathers_rows, tap, token, right, outputs);
}

template <class K>
__device__ void sum_gradient(const GenericGradient& g, const GradientItem& item, void* shared) {
  using T = typename K::Element;
  cuda::Sums<T, K::outputs> sums;
  const int64_t steps = ceil_div(g.tokens(), kDepth<T>);
  const int64_t first = steps * item.slice / g.slices, last = steps * (item.slice + 1) / g.slices;
  cuda::pipeline<K::stages>(
      last - first,
      [&](int64_t step, int stage) { load_gradient<K>(g, item, (first + step) * kDepth<T>, Stage<K>(shared, stage)); },
      [&](int stage) {
        const Stage<K> s(shared, stage);
        if (!warp_has_rows(int64_t{item.last - item.first} << g.block_shift)) return;
        sums.add(cuda::TileShape<T, kTileRows>::make(s.left, false),
                 cuda::TileShape<T, K::outputs>::make(s.right, false), nullptr);
      });
  auto* staged = static_cast<typename K::Sum*>(shared);
  sums.for_each([&](int row, int column, typename K::Sum sum) { staged[row * K::pitch + column] = sum; });
  __syncthreads();
}

// Calls body(offset in dW, inside, sum) for the elements of block `i` in the tile, at the item's tap.
template <class K, class Body>
__device__ void for_each_of_block(const GenericGradient& g, const GradientItem& item, int32_t i,
                                  const typename K::Sum* sums, Body body) {
  const int width = min(g.block, kTileRows), row = (i - item.first) * width;
  const int32_t output = g.out_of[i] * g.block + item.output, input = g.refs[i].from * g.block + item.input;
  const int64_t filter = (int64_t{i} * g.taps + item.tap) << 2 * g.block_shift;
  for (int e = static_cast<int>(threadIdx.x); e < width * K::outputs; e += kThreads) {
    const int o = e / width, k = e % width;
    const bool inside = output + o < g.rows.channels && input + k < g.columns.channels;
    body(filter + (int64_t{item.output + o} << g.block_shift) + item.input + k, inside, sums[(row + k) * K::pitch + o]);
  }
}

// Stores an element of dW: its sum times the gate, or nothing of it beyond the edge.
template <class T, class Sum>
__device__ inline void store_element(const GenericGradient& g, int32_t block, int64_t at, bool inside, Sum sum) {
  const Sum gate = g.gates == nullptr ? 1 : static_cast<const Sum*>(g.gates)[block];
  const Sum value = inside && gate != 0 ? gate * sum : 0;
  if (g.accumulate && !inside) return;
  if (g.dw_is_wide) {
    Sum& to = static_cast<Sum*>(g.dw)[at];
    to = g.accumulate ? to + value : value;
  } else {
    T& to = static_cast<T*>(g.dw)[at];
    to = narrow<T>(g.accumulate ? widen(to) + value : value);
  }
}

// How many elements dW has, over all taps.
__device__ inline int64_t elements(const GenericGradient& g) { return int64_t{g.blocks} * g.taps << 2 * g.block_shift; }

// Writes dW, or a slice's sums, and returns this thread's part of <S, W>.
template <class K>
__device__ typename K::Sum store_gradient(const GenericGradient& g, const GradientItem& item, int32_t i,
                                          const typename K::Sum* sums) {
  using T = typename K::Element;
  using Sum = typename K::Sum;
  Sum product = 0;
  for_each_of_block<K>(g, item, i, sums, [&](int64_t at, bool inside, Sum sum) {
    if (g.partial != nullptr) {
      static_cast<Sum*>(g.partial)[item.slice * elements(g) + at] = sum;
      return;
    }
    if (inside && g.dgates != nullptr) product += sum * widen(static_cast<const T*>(g.w)[at]);
    store_element<T>(g, i, at, inside, sum);
  });
  return product;
}

// The sum over all threads, in thread 0: lanes first, then warps, always in this order.
template <class Sum>
__device__ Sum sum_of_threads(Sum mine) {
  __shared__ Sum of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) mine += __shfl_down_sync(0xffffffff, mine, step);
  __syncthreads();  // all have read what of_warp held
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Sum all = 0;
  for (const Sum warp : of_warp) all += warp;
  return all;
}

// An item is one tap, and one quarter of a block of 128. With gates' gradients an item has all of them.
template <class K>
__global__ void __launch_bounds__(kThreads) generic_gradient(const __grid_constant__ GenericGradient g) {
  using Sum = typename K::Sum;
  extern __shared__ uint4 shared[];
  const auto* staged = reinterpret_cast<const Sum*>(shared);
  const int quarters = g.block > kTileRows ? 4 : 1, parts = quarters * g.taps,
            together = g.dgates == nullptr ? 1 : parts;
  const int run = max(kTileRows >> g.block_shift, 1);
  const int64_t of_run = int64_t{parts / together} * g.slices;
  for (int64_t i = blockIdx.x; i / of_run * run < g.blocks; i += gridDim.x) {
    const auto begin = static_cast<int32_t>(i / of_run * run), end = min(begin + run, g.blocks);
    for (GradientItem item{begin, begin, 0, 0, 0, 0}; item.first < end; item.first = item.last) {
      while (item.last < end && g.out_of[item.last] == g.out_of[item.first]) ++item.last;
      Sum gate_sum[8] = {};  // a tile has at most 8 blocks
      for (int q = 0; q < together; ++q) {
        const int part = together == 1 ? static_cast<int>(i % parts) : q, quarter = part % quarters;
        item.slice = static_cast<int>(i / parts % g.slices);
        item.tap = part / quarters;
        item.output = quarter / 2 * kTileRows;
        item.input = quarter % 2 * kTileRows;
        sum_gradient<K>(g, item, shared);
        for (int32_t block = item.first; block < item.last; ++block) {
          const Sum product = store_gradient<K>(g, item, block, staged);
          if (g.dgates != nullptr) gate_sum[block - item.first] += sum_of_threads(product);
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

// Adds the slices' sums in their order.
template <class T>
__global__ void __launch_bounds__(kThreads) generic_combine(const __grid_constant__ GenericGradient g) {
  using Sum = SumOf<T>;
  const int64_t count = elements(g);
  for (int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x; at < count; at += int64_t{gridDim.x} * kThreads) {
    Sum sum = 0;
    for (int slice = 0; slice < g.slices; ++slice) sum += static_cast<const Sum*>(g.partial)[slice * count + at];
    const auto inner = static_cast<int32_t>(at & ((int64_t{1} << 2 * g.block_shift) - 1));
    const auto block = static_cast<int32_t>((at >> 2 * g.block_shift) / g.taps);
    const int64_t output = int64_t{g.out_of[block]} * g.block + (inner >> g.block_shift);
    const int64_t input = int64_t{g.refs[block].from} * g.block + (inner & (g.block - 1));
    store_element<T>(g, block, at, output < g.rows.channels && input < g.columns.channels, sum);
  }
}

template <class T>
Status launch_gradient(const WeightGradient& g, const CudaCall& call) {
  const int32_t block = g.layout.block_size;
  const auto taps = static_cast<int32_t>(g.gather.taps());
  const GenericGradient args{.refs = gemm::walk_on_device(g.layout, false).refs,
                             .out_of = gemm::out_of_on_device(g.layout),
                             .blocks = static_cast<int32_t>(g.layout.blocks),
                             .block = block,
                             .block_shift = shift_of(block),
                             .taps = taps,
                             .gather = device_gather(g.gather),
                             .gathers_rows = g.gathers_rows,
                             .rows = images_of<T>(g.rows, g.row_channels),
                             .columns = images_of<T>(g.columns, g.column_channels),
                             .w = g.w,
                             .gates = g.gates,
                             .dw = g.dw,
                             .dgates = g.dgates,
                             .dw_is_wide = g.dw_dtype == sum_dtype(g.dtype),
                             .accumulate = g.accumulate,
                             .slices = generic_slices(g),
                             .partial = generic_slices(g) > 1 ? call.workspace.data : nullptr};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  BS_RETURN_IF_ERROR(with_outputs(block, [&]<int N>() {
    const int64_t parts = g.dgates != nullptr ? 1 : taps * (block > kTileRows ? 4 : 1);
    const int64_t run = std::max(kTileRows / block, 1);
    return cuda::launch({.blocks = ceil_div(g.layout.blocks, run) * parts * args.slices,
                         .threads = kThreads,
                         .shared_bytes = Kernel<T, N>::shared_bytes,
                         .stream = stream},
                        generic_gradient<Kernel<T, N>>, args);
  }));
  if (args.partial == nullptr) return {};
  const int64_t count = g.layout.blocks * taps * block * block;
  return cuda::launch(
      {.blocks = std::min<int64_t>(ceil_div(count, kThreads), 4096), .threads = kThreads, .stream = stream},
      generic_combine<T>, args);
}

template <class T>
Status prepare_generic() {
  static_assert(kTileRows == kGenericRows);
  BS_RETURN_IF_ERROR(cuda::prepare(generic_combine<T>, 0));
  for (int32_t block : {8, 16, 32, 64}) {
    BS_RETURN_IF_ERROR(with_outputs(block, [&]<int N>() {
      BS_RETURN_IF_ERROR(cuda::prepare(generic_product<Kernel<T, N>>, Kernel<T, N>::shared_bytes));
      return cuda::prepare(generic_gradient<Kernel<T, N>>, Kernel<T, N>::shared_bytes);
    }));
  }
  return {};
}

template <class T>
CudaKernels make_generic(DType dtype) {
  return {CudaWay::generic, dtype, prepare_generic<T>, launch_product<T>, launch_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::conv
