// The layer norm forward for 16-bit types on Hopper: a row is read once, by several thread blocks if it is long, and
// what the kernel in front does not write is there before it has ended.
#include "cuda/ptx/griddepcontrol.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/wide.cuh"

namespace blocksparse::norm {
namespace {

// R rows of a thread.
template <class T, int R>
__global__ void __launch_bounds__(R == 4 ? kWideThreads : kManyRowsThreads, 2)
    norm_forward_wide([[maybe_unused]] const __grid_constant__ Forward p,
                      [[maybe_unused]] const __grid_constant__ WidePlan plan) {
#if __CUDA_ARCH__ >= 900
  __shared__ WideShared<R, 1> shared;
  ptx::cluster_arrive_relaxed();
  if (!p.x_is_last) ptx::griddepcontrol_wait();
  const int64_t vectors = p.features / 8;
  const auto parts = static_cast<uint32_t>(plan.parts), place = blockIdx.x / static_cast<uint32_t>(plan.cluster);
  const uint32_t group = place / parts, part = place % parts;
  const WideSpot spot(plan, vectors);
  const int64_t token = int64_t{part} * plan.tokens_at_once() + spot.group * R;
  const auto row = [&](int r) { return (token + r) * p.groups + group; };
  const auto at = [&](int r) { return row(r) * p.features + spot.vector * 8; };
  const auto there = [&](int r) { return spot.inside && token + r < p.n; };
  float gain[8] = {}, shift[8] = {};
  if (spot.inside) {
    load_sums(p.gain, group * p.features + spot.vector * 8, gain);
    load_sums(p.shift, group * p.features + spot.vector * 8, shift);
  }
  // Of both, one is loaded at the end; so is either where registers are short.
  const void* first = p.factor != nullptr ? p.factor : p.term;
  constexpr bool kAhead = R == 4;
  Eight<T> x[R], other[4];
#pragma unroll
  for (int r = 0; r < R && kAhead; ++r) {
    other[r] = first != nullptr && there(r) ? Eight<T>::load(first, at(r)) : Eight<T>{};
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
#pragma unroll
  for (int r = 0; r < R; ++r) x[r] = there(r) ? Eight<T>::load(p.x, at(r)) : Eight<T>{};
  find_stats(plan, spot, vectors, static_cast<float>(p.epsilon), 0, shared, x);
  const auto& stats = shared.stats[spot.group];
  if (spot.rank == 0 && spot.lane < R && token + spot.lane < p.n) {
    static_cast<float2*>(p.stats)[row(spot.lane)] = stats[spot.lane];
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float2 of = stats[r];
    float v[8];
    if (!kAhead && r % 4 == 0 && first != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) other[i] = there(r + i) ? Eight<T>::load(first, at(r + i)) : Eight<T>{};
    }
    Eight<T>& more = other[r % 4];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = (x[r].at(e) - of.x) * of.y * gain[e] + shift[e];
    if (p.factor != nullptr) {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] *= more.at(e);
      if (p.term != nullptr && there(r)) more = Eight<T>::load(p.term, at(r));
    }
    if (p.term != nullptr) {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] += more.at(e);
    }
    Eight<T> y;
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const auto final = [&](float z) { return p.relu && z < 0 ? 0.0f : z; };
      y.set_pair(e, final(v[e]), final(v[e + 1]));
    }
    if (there(r)) y.store(p.y, at(r));
  }
#endif
}

WidePlan plan_of(const Forward& f, const cuda::Card& card) {
  return plan_wide_forward(f.n, f.groups, f.features / 8, card.multiprocessors);
}

template <class T>
Status prepare_type() {
  BS_RETURN_IF_ERROR(cuda::prepare_for_many(norm_forward_wide<T, 4>, 0));
  return cuda::prepare_for_many(norm_forward_wide<T, 8>, 0);
}

}  // namespace

bool wide_takes(const Forward& f, const CudaPlace& place) {
  return place.overlap && size_of(f.dtype) == 2 && f.features % 8 == 0 &&
         aligned(f.features, 8, {f.x, f.gain, f.shift, f.factor, f.term, f.y}) &&
         reinterpret_cast<uintptr_t>(f.stats) % sizeof(float2) == 0 && plan_of(f, place.card).fits();
}

Status launch_wide(const Forward& f, const CudaPlace& place) {
  const WidePlan plan = plan_of(f, place.card);
  const auto launch = [&](auto kernel) {
    return cuda::launch({.blocks = f.groups * plan.parts * plan.cluster,
                         .threads = plan.threads(),
                         .stream = place.stream,
                         .overlap = true,
                         .cluster = plan.cluster},
                        kernel, f, plan);
  };
  const auto with_rows = [&]<class T>() {
    return launch(plan.tokens == 4 ? norm_forward_wide<T, 4> : norm_forward_wide<T, 8>);
  };
  return f.dtype == DType::bf16 ? with_rows.template operator()<Bf16>() : with_rows.template operator()<F16>();
}

Status prepare_wide(const cuda::Card&) {
  BS_RETURN_IF_ERROR(prepare_type<Bf16>());
  return prepare_type<F16>();
}

}  // namespace blocksparse::norm
