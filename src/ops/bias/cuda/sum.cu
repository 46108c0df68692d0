// The gradient of a bias on a card: bound by reading dy once. See Plan in bias.h for how tokens are divided.
//   bias_parts   threads side by side have vectors of features, the other threads of the block other tokens; their sums
//                are added by shuffles, then by warps, in a fixed order
//   bias_sum     adds the parts, if there are several
#include "core/text.h"
#include "cuda/card.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/once.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/bias/bias.h"

namespace blocksparse::bias {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kAtOnce = 8;  // vectors that a thread waits for at once

template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
  T of[V];
};

// parts [parts, features]; without it the one part is the result. The compiler waits for two or three vectors at once
// unless it is told how many registers there are.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, 4)
    bias_parts(const __grid_constant__ Gradient g, const __grid_constant__ Plan plan, SumOf<T>* parts) {
  using S = SumOf<T>;
  __shared__ S of_warp[kWarps][kLanes * V];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto thread = static_cast<int>(threadIdx.x);
  const int place = thread % plan.lanes, row = thread / plan.lanes, rows = kThreads / plan.lanes;
  const int64_t part = blockIdx.x % static_cast<uint32_t>(plan.parts);
  const int64_t first = blockIdx.x / static_cast<uint32_t>(plan.parts) * static_cast<int64_t>(plan.lanes * V);
  const int64_t begin = g.n * part / plan.parts + row, end = g.n * (part + 1) / plan.parts;
  S sum[V] = {};
  if (first + place * V < g.features && begin < end) {
    const T* from = static_cast<const T*>(g.dy) + begin * g.token_stride + first + place * V;
    const int64_t step = rows * g.token_stride;
    int64_t left = (end - begin + rows - 1) / rows;
    for (; left >= kAtOnce; left -= kAtOnce, from += kAtOnce * step) {
      Vector<T, V> read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) read[i] = *reinterpret_cast<const Vector<T, V>*>(from + i * step);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < V; ++e) sum[e] += widen(read[i].of[e]);
      }
    }
    for (; left > 0; --left, from += step) {
      const Vector<T, V> read = *reinterpret_cast<const Vector<T, V>*>(from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += widen(read.of[e]);
    }
  }
  for (int step = plan.lanes; step < 32; step *= 2) {
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += __shfl_xor_sync(~0u, sum[e], step);
  }
  if (thread % 32 < plan.lanes) {
#pragma unroll
    for (int e = 0; e < V; ++e) of_warp[thread / 32][place * V + e] = sum[e];
  }
  __syncthreads();
  if (thread >= plan.lanes * V || first + thread >= g.features) return;
  S all = of_warp[0][thread];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) all += of_warp[warp][thread];
  if (parts != nullptr) parts[part * g.features + first + thread] = all;
  else static_cast<T*>(g.dbias)[first + thread] = narrow<T>(all);
}

constexpr int kSumWarps = 16;  // of a thread block, for 32 features

template <class T>
__global__ void __launch_bounds__(32 * kSumWarps)
    bias_sum(const __grid_constant__ Gradient g, int64_t parts, const SumOf<T>* of_part) {
  using S = SumOf<T>;
  __shared__ S of_warp[kSumWarps][32];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t feature = int64_t{blockIdx.x} * 32 + lane;
  S sum = 0;
  if (feature < g.features) {
#pragma unroll 8
    for (int64_t part = warp; part < parts; part += kSumWarps) sum += of_part[part * g.features + feature];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || feature >= g.features) return;
#pragma unroll
  for (int other = 1; other < kSumWarps; ++other) sum += of_warp[other][lane];
  static_cast<T*>(g.dbias)[feature] = narrow<T>(sum);
}

template <class Body>
Status with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<Bf16>();
    case DType::f16: return body.template operator()<F16>();
  }
  return invalid("[bias_gradient] dtype is ", static_cast<int>(dtype));
}

// Whether the kernels may begin before the kernel in front has ended. The first call on a device loads them.
Result<bool> prepared(Device device) {
  static cuda::KnownPerDevice overlaps;
  return overlaps(device, [&]() -> Result<bool> {
    for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      BS_RETURN_IF_ERROR(with_type(dtype, [&]<class T>() -> Status {
        BS_RETURN_IF_ERROR((cuda::prepare(bias_parts<T, kVector<T>>, 0)));
        BS_RETURN_IF_ERROR((cuda::prepare(bias_parts<T, 1>, 0)));
        return cuda::prepare(bias_sum<T>, 0);
      }));
    }
    return cuda::has_griddepcontrol(bias_sum<float>);
  });
}

template <class T, int V>
Status launch(const Gradient& g, void* workspace, cudaStream_t stream, bool overlap) {
  const Plan plan = plan_of(g.n, g.features, V, sizeof(SumOf<T>));
  SumOf<T>* parts = plan.parts > 1 ? static_cast<SumOf<T>*>(workspace) : nullptr;
  BS_RETURN_IF_ERROR(
      cuda::launch({.blocks = plan.strips * plan.parts, .threads = kThreads, .stream = stream, .overlap = overlap},
                   bias_parts<T, V>, g, plan, parts));
  if (parts == nullptr) return {};
  return cuda::launch(
      {.blocks = ceil_div(g.features, int64_t{32}), .threads = 32 * kSumWarps, .stream = stream, .overlap = overlap},
      bias_sum<T>, g, plan.parts, parts);
}

}  // namespace

Status cuda_gradient(const Gradient& g, Workspace workspace, Device device, Stream stream) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto overlap = prepared(device);
  if (!overlap.ok()) return overlap.status();
  const auto queue = static_cast<cudaStream_t>(stream.handle);
  return with_type(g.dtype, [&]<class T>() {
    constexpr int64_t kWide = kVector<T>;
    const bool wide =
        g.features % kWide == 0 && g.token_stride % kWide == 0 && reinterpret_cast<uintptr_t>(g.dy) % 16 == 0;
    return wide ? launch<T, kVector<T>>(g, workspace.data, queue, *overlap)
                : launch<T, 1>(g, workspace.data, queue, *overlap);
  });
}

Status prepare_cuda(Device device) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  const auto overlap = prepared(device);
  return overlap.ok() ? Status() : overlap.status();
}

}  // namespace blocksparse::bias
