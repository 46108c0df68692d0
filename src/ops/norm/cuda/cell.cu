// The norm of four gates and a step of the LSTM's cell in one kernel: the normalised gates exist in registers alone.
//   wide    16-bit types on Hopper: a thread has 8 units of two sequences; gain and shift come to shared memory once,
//           before z is there
//   plain   anything else: a thread block for each sequence, which reads z three times, twice of them from L1 and L2
#include "cuda/gates.cuh"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/wide.cuh"

namespace blocksparse::norm {
namespace {

[[maybe_unused]] constexpr int kTokens = 2;  // of a thread; code for cards before 9.0 has none of this
constexpr int kPlainThreads = 256;

constexpr int affine_bytes(const WidePlan& plan) { return 2 * kGates * plan.per * 8 * static_cast<int>(sizeof(float)); }

// gain [kGates][per][8], then shift: this thread block's features.
[[maybe_unused]] __device__ inline void load_affine(const CellForward& p, const WidePlan& plan, const WideSpot& spot,
                                                    int64_t vectors, float* to, uint64_t* loaded) {
  const int64_t first = int64_t{spot.rank} * plan.per, count = min(int64_t{plan.per}, vectors - first);
  const uint32_t barrier = ptx::shared_address(loaded), bytes = count > 0 ? static_cast<uint32_t>(count * 32) : 0;
  ptx::mbarrier_arrive_expect(barrier, 2 * kGates * bytes);
  if (bytes == 0) return;
  for (int i = 0; i < 2 * kGates; ++i) {
    const auto* from = static_cast<const float*>(i < kGates ? p.gain : p.shift);
    ptx::load_bulk(ptx::shared_address(to + i * plan.per * 8), from + i % kGates * p.features + first * 8, bytes,
                   barrier);
  }
}

// 8 units of a sequence, whose z is packed: h is stored, and gates if wanted; c becomes the new cell.
template <class T>
__device__ inline void step_units(const CellForward& p, int64_t token, int64_t vector, const float* affine, int per,
                                  const Eight<T>* z, const float2* stats, float (&c)[8]) {
  const int64_t at = token * p.features + vector * 8, at4 = at + token * (kGates - 1) * p.features;
  Eight<T> h, gates[kGates];
#pragma unroll
  for (int quad = 0; quad < 8; quad += 4) {
    float units[4][kGates];
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const float2 of = stats[g];
      float gain[4], shift[4];
      Vector<float, 4>::load(affine, g * per * 8 + quad, gain);
      Vector<float, 4>::load(affine, (kGates + g) * per * 8 + quad, shift);
#pragma unroll
      for (int e = 0; e < 4; ++e) units[e][g] = (z[g].at(quad + e) - of.x) * of.y * gain[e] + shift[e];
    }
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const float low = lstm::forward_unit<T>(units[e], c[quad + e]);
      h.set_pair(quad + e, low, lstm::forward_unit<T>(units[e + 1], c[quad + e + 1]));
#pragma unroll
      for (int g = 0; g < kGates; ++g) gates[g].set_pair(quad + e, units[e][g], units[e + 1][g]);
    }
  }
  h.store(p.h, at);
  if (p.h_end != nullptr) h.store(p.h_end, at);
  if (p.gates == nullptr) return;
#pragma unroll
  for (int g = 0; g < kGates; ++g) gates[g].store(p.gates, at4 + g * p.features);
}

[[maybe_unused]] __device__ inline void store_cell(void* to, int64_t at, const float (&c)[8]) {
  auto* quads = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
  quads[0] = {c[0], c[1], c[2], c[3]};
  quads[1] = {c[4], c[5], c[6], c[7]};
}

template <class T>
__global__ void __launch_bounds__(kWideThreads, 2)
    norm_cell_wide([[maybe_unused]] const __grid_constant__ CellForward p,
                   [[maybe_unused]] const __grid_constant__ WidePlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRows = kTokens * kGates;
  extern __shared__ float4 dynamic[];
  __shared__ WideShared<kRows, 2> shared;
  __shared__ uint64_t loaded;
  auto* affine = reinterpret_cast<float*>(dynamic);
  const int64_t vectors = p.features / 8, step = plan.parts * plan.tokens_at_once();
  const uint32_t place = blockIdx.x / static_cast<uint32_t>(plan.cluster);
  const WideSpot spot(plan, vectors);
  ptx::cluster_arrive_relaxed();
  if (!p.z_is_last) ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(ptx::shared_address(&loaded), 1);
    ptx::fence_mbarrier_init();
    load_affine(p, plan, spot, vectors, affine, &loaded);
  }
  int turn = 0;
  for (int64_t first = int64_t{place} * plan.tokens_at_once(); first < p.n; first += step, ++turn) {
    const int64_t token = first + spot.group * kTokens;
    const auto there = [&](int t) { return spot.inside && token + t < p.n; };
    const auto at = [&](int t) { return (token + t) * p.features + spot.vector * 8; };
    Eight<T> z[kRows];
    float c[kTokens][8] = {};
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (there(t) && p.c_before != nullptr) load_sums(p.c_before, at(t), c[t]);
    }
    if (turn == 0) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const int64_t row = (token + q / kGates) * kGates + q % kGates;
      z[q] = there(q / kGates) ? Eight<T>::load(p.z, row * p.features + spot.vector * 8) : Eight<T>{};
    }
    find_stats(plan, spot, vectors, static_cast<float>(p.epsilon), turn, shared, z);
    const auto& stats = shared.stats[spot.group];
    if (p.stats != nullptr && spot.rank == 0 && spot.lane < kRows && token + spot.lane / kGates < p.n) {
      static_cast<float2*>(p.stats)[token * kGates + spot.lane] = stats[spot.lane];
    }
    if (turn == 0) ptx::mbarrier_wait(ptx::shared_address(&loaded), 0);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (!there(t)) continue;
      step_units<T>(p, token + t, spot.vector, affine + spot.lane * 8, plan.per, z + t * kGates, stats + t * kGates,
                    c[t]);
      store_cell(p.c, at(t), c[t]);
      if (p.c_end != nullptr) store_cell(p.c_end, at(t), c[t]);
    }
  }
#endif
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads) norm_cell_plain(const __grid_constant__ CellForward p) {
  using S = SumOf<T>;
  __shared__ Two<S> shared[kMostWarps];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t token = blockIdx.x;
  const auto* z = static_cast<const T*>(p.z) + token * kGates * p.features;
  S means[kGates], scales[kGates];
#pragma unroll
  for (int g = 0; g < kGates; g += 2) {
    Two<S> sum = {0, 0};
    for (int64_t i = threadIdx.x; i < p.features; i += kPlainThreads) {
      sum.a += widen(z[g * p.features + i]), sum.b += widen(z[(g + 1) * p.features + i]);
    }
    sum = sum_of_block(sum, shared);
    const S count = static_cast<S>(p.features), first = sum.a / count, second = sum.b / count;
    sum = {0, 0};
    for (int64_t i = threadIdx.x; i < p.features; i += kPlainThreads) {
      const S a = widen(z[g * p.features + i]) - first, b = widen(z[(g + 1) * p.features + i]) - second;
      sum.a += a * a, sum.b += b * b;
    }
    sum = sum_of_block(sum, shared);
    means[g] = first, means[g + 1] = second;
    scales[g] = 1 / sqrt(sum.a / count + static_cast<S>(p.epsilon));
    scales[g + 1] = 1 / sqrt(sum.b / count + static_cast<S>(p.epsilon));
  }
  for (int64_t i = threadIdx.x; i < p.features; i += kPlainThreads) {
    const int64_t at_unit = token * p.features + i;
    S unit[kGates], c = p.c_before == nullptr ? S(0) : static_cast<const S*>(p.c_before)[at_unit];
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const int64_t at = g * p.features + i;
      unit[g] = (widen(z[at]) - means[g]) * scales[g] * static_cast<const S*>(p.gain)[at] +
                static_cast<const S*>(p.shift)[at];
    }
    const T h = narrow<T>(lstm::forward_unit<T>(unit, c));
    static_cast<T*>(p.h)[at_unit] = h;
    static_cast<S*>(p.c)[at_unit] = c;
    if (p.h_end != nullptr) static_cast<T*>(p.h_end)[at_unit] = h;
    if (p.c_end != nullptr) static_cast<S*>(p.c_end)[at_unit] = c;
    if (p.gates == nullptr) continue;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      static_cast<T*>(p.gates)[(token * kGates + g) * p.features + i] = narrow<T>(unit[g]);
    }
  }
  if (p.stats == nullptr || threadIdx.x != 0) return;
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    auto* to = static_cast<S*>(p.stats) + (token * kGates + g) * 2;
    to[0] = means[g], to[1] = scales[g];
  }
}

WidePlan plan_of(const CellForward& f, const CudaPlace& place) {
  if (!place.overlap || size_of(f.dtype) != 2 || f.features % 8 != 0) return {};
  if (!aligned(f.features, 8, {f.z, f.gain, f.shift, f.c_before, f.h, f.c, f.gates, f.stats, f.h_end, f.c_end}))
    return {};
  return plan_wide_cell(f.n, f.features / 8, place.card.multiprocessors);
}

template <class T>
Status launch_type(const CellForward& f, const CudaPlace& place) {
  if constexpr (sizeof(T) == 2) {
    const WidePlan plan = plan_of(f, place);
    if (plan.fits()) {
      return cuda::launch({.blocks = plan.parts * plan.cluster,
                           .threads = plan.threads(),
                           .shared_bytes = affine_bytes(plan),
                           .stream = place.stream,
                           .overlap = true,
                           .cluster = plan.cluster},
                          norm_cell_wide<T>, f, plan);
    }
  }
  return cuda::launch({.blocks = f.n, .threads = kPlainThreads, .stream = place.stream, .overlap = place.overlap},
                      norm_cell_plain<T>, f);
}

template <class T>
Status prepare_type(const cuda::Card& card) {
  // Others have less shared memory than it asks for.
  if constexpr (sizeof(T) == 2) {
    if (card.sm90a) BS_RETURN_IF_ERROR(cuda::prepare_for_many(norm_cell_wide<T>, affine_bytes({.per = kWideThreads})));
  }
  return cuda::prepare(norm_cell_plain<T>, 0);
}

}  // namespace

Status prepare_cell(const cuda::Card& card) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const Status status = with_type(dtype, [&]<class T>() { return prepare_type<T>(card); });
    BS_RETURN_IF_ERROR(status);
  }
  return {};
}

Status cuda_cell_forward(const CellForward& f, Device device, Stream stream) {
  constexpr int64_t kMost = 0x7fffffff;
  if (f.n == 0) return {};
  if (f.n > kMost) return invalid("[deep_update] z has ", f.n, " tokens, a card takes ", kMost);
  return on_device(device, stream, [&](const CudaPlace& place) {
    return with_type(f.dtype, [&]<class T>() { return launch_type<T>(f, place); });
  });
}

}  // namespace blocksparse::norm
