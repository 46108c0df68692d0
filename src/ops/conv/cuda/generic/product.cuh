// fprop and dgrad on any CUDA card: see tile.cuh.
#pragma once

#include "core/ceil_div.h"
#include "ops/conv/cuda/generic/tile.cuh"

namespace blocksparse::conv {
namespace {

struct GenericProduct {
  gemm::DeviceWalk walk;
  int32_t rows, block, block_shift;
  cuda::Divider taps;
  DeviceGather gather;
  DeviceImages x, y, residual;  // residual.data may be null
  const void* w;
  bool w_aligned, by_in;
  const void *gates, *bias;
  Activation activation;
};

// A tile: 64 pixels x K::outputs outputs of one row of blocks.
struct ProductItem {
  int64_t token;
  int32_t row, output;  // the output counts within the block
  int32_t first, blocks;

  template <class K>
  __device__ static bool find(const GenericProduct& p, int64_t item, ProductItem& found) {
    const int64_t parts = p.block / K::outputs, rest = item / parts;
    found.token = rest / p.rows * kTileRows;
    if (found.token >= p.y.n * p.y.pixels()) return false;
    found.row = static_cast<int32_t>(rest % p.rows);
    found.output = static_cast<int32_t>(item % parts) * K::outputs;
    found.first = p.walk.starts[found.row];
    found.blocks = p.walk.starts[found.row + 1] - found.first;
    return true;
  }
};

// A place in the depth: a block at a tap, and an input of it.
struct Entry {
  BlockRef ref;
  int32_t tap, inner;  // the input counts within the block
  int32_t left;        // inputs from there on; 0: the depth has ended

  __device__ static Entry at(const GenericProduct& p, const ProductItem& item, int64_t depth) {
    auto tap = static_cast<int>(depth >> p.block_shift);
    const int block = p.taps.divide(tap);
    if (block >= item.blocks) return {{0, 0}, 0, 0, 0};
    const BlockRef ref = p.walk.refs[item.first + block];
    const auto inner = static_cast<int32_t>(depth) & (p.block - 1);
    return {ref, tap, inner, min(p.block - inner, p.x.channels - ref.from * p.block - inner)};
  }
};

template <class T>
__device__ inline void load_vectors(const GenericProduct& p, const ProductItem& item, int64_t depth,
                                    const cuda::Tile<T>& tile) {
  constexpr int kVectors = kDepth<T> / kVector<T>, kStep = kThreads / kVectors;
  const int column = static_cast<int>(threadIdx.x) % kVectors * kVector<T>;
  const Entry entry = Entry::at(p, item, depth + column);
  const DeviceTap tap = p.gather.tap(entry.tap);
  const int bytes = min(entry.left, kVector<T>) * static_cast<int>(sizeof(T));
  const T* base = static_cast<const T*>(p.x.data);
  const int64_t all = p.y.n * p.y.pixels(), channel = int64_t{entry.ref.from} * p.block + entry.inner;
#pragma unroll 2
  for (int row = static_cast<int>(threadIdx.x) / kVectors; row < kTileRows; row += kStep) {
    int64_t image = 0;
    DevicePixel from{};
    bool there = bytes > 0 && item.token + row < all;
    if (there) there = p.gather.source(p.y.pixel(item.token + row, image), tap, p.x.size, from);
    ptx::cp_async_16(tile.at(row, column), there ? base + p.x.offset(image, from) + channel : base, there ? bytes : 0);
  }
}

// Loads element by element; neighbouring threads have neighbouring pixels.
template <class T>
__device__ inline void load_elements(const GenericProduct& p, const ProductItem& item, int64_t depth,
                                     const cuda::Tile<T>& tile) {
  constexpr int kEach = kDepth<T> / (kThreads / kTileRows);
  const int row = static_cast<int>(threadIdx.x) % kTileRows, first = static_cast<int>(threadIdx.x) / kTileRows * kEach;
  const bool inside = item.token + row < p.y.n * p.y.pixels();
  int64_t image = 0;
  const DevicePixel pixel = p.y.pixel(inside ? item.token + row : 0, image);
  const T* base = static_cast<const T*>(p.x.data);
#pragma unroll 1
  for (int k = first; k < first + kEach; k += 8) {  // 8 inputs lie in one block
    const Entry entry = Entry::at(p, item, depth + k);
    DevicePixel from{};
    const bool there = inside && entry.left > 0 && p.gather.source(pixel, p.gather.tap(entry.tap), p.x.size, from);
    const int64_t offset = there ? p.x.offset(image, from) : 0;
    const int32_t channel = entry.ref.from * p.block + entry.inner;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t from_channel = there && i < entry.left ? p.x.channel(channel + i) : -1;
      *tile.at(row, k + i) = p.x.has(from_channel) ? base[offset + from_channel * p.x.channel_stride] : T{};
    }
  }
}

template <class K>
__device__ void load_product(const GenericProduct& p, const ProductItem& item, int64_t step, const Stage<K>& stage) {
  using T = typename K::Element;
  const int64_t depth = step * kDepth<T>;
  const auto left = cuda::TileShape<T, kTileRows>::make(stage.left, true);
  if (p.x.in_vectors) load_vectors(p, item, depth, left);
  else load_elements(p, item, depth, left);
  const int64_t of_input = p.by_in ? p.block : 1, of_output = p.by_in ? 1 : p.block;
  const auto weights = [&](int k) -> Place {
    const Entry entry = Entry::at(p, item, depth + k);
    const int64_t id = int64_t{entry.ref.weight} * p.taps.by + entry.tap;
    return {(id << 2 * p.block_shift) + entry.inner * of_input, entry.left};
  };
  const auto* w = static_cast<const T*>(p.w) + item.output * of_output;
  const auto right = cuda::TileShape<T, K::outputs>::make(stage.right, !p.by_in);
  cuda::load_tile<K::outputs>(right, w, p.w_aligned, cuda::Even{of_output, K::outputs}, weights);
  if (p.gates != nullptr && threadIdx.x < K::gates_elements) {
    const Entry entry = Entry::at(p, item, depth + static_cast<int>(threadIdx.x) * 8);
    stage.gates[threadIdx.x] = entry.left > 0 ? static_cast<const SumOf<T>*>(p.gates)[entry.ref.weight] : 0;
  }
}

template <class K>
__device__ void finish_product(const GenericProduct& p, const ProductItem& item, const typename K::Sum* sums) {
  using T = typename K::Element;
  const bool by_output = p.y.channel_stride == 1;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * K::outputs; i += kThreads) {
    const int row = by_output ? i / K::outputs : i % kTileRows, column = by_output ? i % K::outputs : i / kTileRows;
    const int64_t token = item.token + row;
    const int32_t output = item.row * p.block + item.output + column;
    if (token >= p.y.n * p.y.pixels() || output >= p.y.channels) continue;
    const int64_t image = token / p.y.pixels(), pixel = token - image * p.y.pixels();
    const int32_t channel = p.y.channel(output);
    if (!p.y.has(channel)) continue;
    const int64_t at = image * p.y.image_stride + pixel * p.y.pixel_stride + channel * p.y.channel_stride;
    typename K::Sum sum = sums[row * K::pitch + column];
    if (p.bias != nullptr) sum += widen(static_cast<const T*>(p.bias)[channel]);
    if (p.residual.data != nullptr) sum += widen(static_cast<const T*>(p.residual.data)[at]);
    static_cast<T*>(const_cast<void*>(p.y.data))[at] = narrow<T>(gemm::activated(p.activation, sum));
  }
}

template <class K>
__global__ void __launch_bounds__(kThreads) generic_product(const __grid_constant__ GenericProduct p) {
  using T = typename K::Element;
  extern __shared__ uint4 shared[];
  ProductItem item;
  for (int64_t i = blockIdx.x; ProductItem::find<K>(p, i, item); i += gridDim.x) {
    cuda::Sums<T, K::outputs> sums;
    const int64_t depth = int64_t{item.blocks} * p.taps.by << p.block_shift;
    cuda::pipeline<K::stages>(
        ceil_div(depth, kDepth<T>),
        [&](int64_t step, int stage) { load_product<K>(p, item, step, Stage<K>(shared, stage)); },
        [&](int stage) {
          const Stage<K> s(shared, stage);
          if (!warp_has_rows(p.y.n * p.y.pixels() - item.token)) return;
          sums.add(cuda::TileShape<T, kTileRows>::make(s.left, true),
                   cuda::TileShape<T, K::outputs>::make(s.right, !p.by_in), p.gates == nullptr ? nullptr : s.gates);
        });
    auto* staged = reinterpret_cast<typename K::Sum*>(shared);
    sums.for_each([&](int row, int column, typename K::Sum sum) { staged[row * K::pitch + column] = sum; });
    __syncthreads();
    finish_product<K>(p, item, staged);
    __syncthreads();
  }
}

template <class T>
Status launch_product(const Product& p, const CudaCall& call) {
  const int32_t block = p.layout.block_size;
  const int64_t rows = ceil_div(p.y.channels, block);
  const GenericProduct args{.walk = gemm::walk_on_device(p.layout, p.by_in),
                            .rows = static_cast<int32_t>(rows),
                            .block = block,
                            .block_shift = shift_of(block),
                            .taps = cuda::Divider(p.gather.taps()),
                            .gather = device_gather(p.gather),
                            .x = images_of<T>(p.x, p.x_channels),
                            .y = images_of<T>(p.y, p.y_channels),
                            .residual = images_of<T>(p.residual, nullptr),
                            .w = p.w,
                            .w_aligned = reinterpret_cast<uintptr_t>(p.w) % cuda::kVectorBytes == 0,
                            .by_in = p.by_in,
                            .gates = p.gates,
                            .bias = p.bias,
                            .activation = p.activation};
  return with_outputs(block, [&]<int N>() {
    const int64_t tiles = ceil_div(p.y.n * p.y.pixels(), kTileRows);
    return cuda::launch({.blocks = tiles * rows * (block / N),
                         .threads = kThreads,
                         .shared_bytes = Kernel<T, N>::shared_bytes,
                         .stream = static_cast<cudaStream_t>(call.stream)},
                        generic_product<Kernel<T, N>>, args);
  });
}

}  // namespace
}  // namespace blocksparse::conv
