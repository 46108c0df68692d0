// to[row, c] = from[row, table[c]], rows of 16-bit channels, at the speed of memory.
// Who does what
//   table     every thread block makes it once in shared memory: the order, or its inverse
//   load      tiles of whole rows as they lie, so in vectors of 16 bytes
//   store     a thread has 8 channels. It keeps their places in registers for all rows of a tile, picks their values
//             from shared memory and stores 16 bytes. Neighbouring threads store neighbouring channels
#include "ops/conv/cuda/order/copy.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::conv {
namespace {

constexpr int kOrderThreads = 256;
constexpr int kVector = 8;            // channels
constexpr int kTileBytes = 8 * 1024;  // of a tile, or one row; a thread block has several tiles, so that all end
                                      // together
constexpr int kOrderResident = 8;     // thread blocks of an SM, at most
constexpr int kNowhere = -1;          // in the table: no channel
constexpr int kMostOrderedBytes = kMostOrderedChannels * 4 + std::max<int>(kTileBytes, kMostOrderedChannels * 2);

struct OrderTask {
  const uint16_t* from;
  uint16_t* to;
  const int32_t* order;
  int64_t rows;
  int32_t channels, tile_rows;
  int32_t lane_shift;  // 2^lane_shift neighbouring threads share a row
  bool inverse;
};

__device__ inline void make_table(const OrderTask& t, int32_t* table) {
  const auto first = static_cast<int32_t>(threadIdx.x);
  const auto inside = [&](int32_t channel) { return channel >= 0 && channel < t.channels; };
  if (!t.inverse) {
    for (int32_t c = first; c < t.channels; c += kOrderThreads) {
      const int32_t channel = t.order[c];
      table[c] = inside(channel) ? channel : kNowhere;
    }
    return;
  }
  for (int32_t c = first; c < t.channels; c += kOrderThreads) table[c] = kNowhere;
  __syncthreads();
  for (int32_t c = first; c < t.channels; c += kOrderThreads) {
    const int32_t channel = t.order[c];
    if (inside(channel)) atomicMax(&table[channel], c);  // the result does not depend on the order of threads
  }
}

__device__ inline void load_rows(const OrderTask& t, int64_t first, int rows, uint16_t* tile) {
  const uint16_t* from = t.from + first * t.channels;
  const int vectors = rows * t.channels / kVector;
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kOrderThreads) {
    ptx::cp_async_16(tile + i * kVector, from + i * kVector, 16);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

__device__ inline void store_rows(const OrderTask& t, int64_t first, int rows, const int32_t* table,
                                  const uint16_t* tile) {
  const int lanes = 1 << t.lane_shift, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int first_row = static_cast<int>(threadIdx.x) >> t.lane_shift, step = kOrderThreads >> t.lane_shift;
  for (int c = lane * kVector; c < t.channels; c += lanes * kVector) {
    const int4 low = *reinterpret_cast<const int4*>(table + c), high = *reinterpret_cast<const int4*>(table + c + 4);
    const int32_t places[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll 2
    for (int row = first_row; row < rows; row += step) {
      const uint16_t* channels = tile + row * t.channels;
      uint32_t picked[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) picked[i] = places[i] == kNowhere ? 0 : channels[places[i]];
      *reinterpret_cast<uint4*>(t.to + (first + row) * t.channels + c) = {
          picked[0] | picked[1] << 16, picked[2] | picked[3] << 16, picked[4] | picked[5] << 16,
          picked[6] | picked[7] << 16};
    }
  }
}

__global__ void __launch_bounds__(kOrderThreads, kOrderResident) order_rows(const __grid_constant__ OrderTask t) {
  extern __shared__ uint4 shared[];
  auto* table = reinterpret_cast<int32_t*>(shared);
  auto* tile = reinterpret_cast<uint16_t*>(table + t.channels);
  // The kernel in front is complete before the kernel behind begins: see gemm/cuda/stream_w/pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  make_table(t, table);
  const int64_t step = int64_t{gridDim.x} * t.tile_rows;
  for (int64_t first = int64_t{blockIdx.x} * t.tile_rows; first < t.rows; first += step) {
    const auto rows = static_cast<int>(min(int64_t{t.tile_rows}, t.rows - first));
    load_rows(t, first, rows, tile);
    __syncthreads();
    store_rows(t, first, rows, table, tile);
    __syncthreads();
  }
}

constexpr int kSumThreads = 256;

template <class From, class To>
struct SumTask {
  const From* from;
  To* to;
  int64_t count;
};

template <class From, class To>
__global__ void __launch_bounds__(kSumThreads) convert_sums(const __grid_constant__ SumTask<From, To> t) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t step = int64_t{gridDim.x} * kSumThreads;
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < t.count; i += step) {
    t.to[i] = narrow<To>(widen(t.from[i]));
  }
}

template <class From, class To>
Status convert(const void* from, void* to, int64_t count, const CudaCall& call) {
  return cuda::launch({.blocks = std::clamp<int64_t>(ceil_div(count, kSumThreads), 1, 4096),
                       .threads = kSumThreads,
                       .stream = static_cast<cudaStream_t>(call.stream),
                       .overlap = call.card.sm90a},
                      convert_sums<From, To>,
                      SumTask<From, To>{static_cast<const From*>(from), static_cast<To*>(to), count});
}

template <class T>
Status prepare_sums() {
  BS_RETURN_IF_ERROR(cuda::prepare(convert_sums<float, T>, 0));
  return cuda::prepare(convert_sums<T, float>, 0);
}

}  // namespace

Status copy_channels(const ChannelCopy& copy, const CudaCall& call) {
  const auto channels = static_cast<int32_t>(copy.from.channels);
  const int64_t rows = copy.from.n * copy.from.pixels();
  int32_t lane_shift = 0;
  while (lane_shift < 5 && (kVector << lane_shift) < channels) ++lane_shift;
  const OrderTask task{.from = static_cast<const uint16_t*>(copy.from.data),
                       .to = static_cast<uint16_t*>(const_cast<void*>(copy.to.data)),
                       .order = copy.order,
                       .rows = rows,
                       .channels = channels,
                       .tile_rows = std::max(1, kTileBytes / (channels * 2)),
                       .lane_shift = lane_shift,
                       .inverse = copy.inverse};
  const int64_t tiles = ceil_div(rows, task.tile_rows);
  const int shared_bytes = channels * 4 + task.tile_rows * channels * 2;
  const int64_t resident = std::clamp(call.card.shared_bytes / (shared_bytes + 1024), 1, kOrderResident);
  return cuda::launch({.blocks = std::clamp<int64_t>(tiles, 1, resident * call.card.multiprocessors),
                       .threads = kOrderThreads,
                       .shared_bytes = shared_bytes,
                       .stream = static_cast<cudaStream_t>(call.stream),
                       .overlap = call.card.sm90a},
                      order_rows, task);
}

Status widen_sums(const void* dw, DType dtype, int64_t count, float* sums, const CudaCall& call) {
  return dtype == DType::bf16 ? convert<Bf16, float>(dw, sums, count, call)
                              : convert<F16, float>(dw, sums, count, call);
}

Status narrow_sums(const float* sums, int64_t count, void* dw, DType dtype, const CudaCall& call) {
  return dtype == DType::bf16 ? convert<float, Bf16>(sums, dw, count, call)
                              : convert<float, F16>(sums, dw, count, call);
}

Status prepare_order() {
  BS_RETURN_IF_ERROR(prepare_sums<Bf16>());
  BS_RETURN_IF_ERROR(prepare_sums<F16>());
  return cuda::prepare_for_many(order_rows, kMostOrderedBytes);
}

}  // namespace blocksparse::conv
