// The layer norm on a card.
//   rows      a thread block for each row, which stays in its registers; longer ones are read again, from L1 and L2
//   columns   dgain and dshift: a thread block for 64 columns of a group, whose warps share the tokens; their sums are
//             added in the order of warps. A cluster of thread blocks shares many tokens
#include <cooperative_groups.h>

#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cuda/once.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/vector.cuh"

namespace blocksparse::norm {
namespace {

constexpr int kColumnWarps = 16;  // of a thread block
constexpr int kColumns = 64;      // two of a lane

// Calls body(i, k) for this thread's vectors: the first element of one, and which it is; from the one numbered Kept on
// they are not in registers.
template <int V, int Kept, class Body>
__device__ inline void for_each_vector(int64_t features, Body body) {
  const auto step = static_cast<int64_t>(blockDim.x) * V;
#pragma unroll
  for (int k = 0; k < Kept; ++k) {
    const int64_t i = threadIdx.x * int64_t{V} + k * step;
    if (i < features) body(i, k);
  }
#pragma unroll 1
  for (int64_t i = threadIdx.x * int64_t{V} + Kept * step; i < features; i += step) body(i, Kept);
}

template <class T, int V, int Kept>
__global__ void __launch_bounds__(32 * kMostWarps, Kept == 2 ? 3 : 1) norm_forward(const __grid_constant__ Forward p) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  __shared__ Two<S> shared[kMostWarps];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x, base = row * p.features, of_group = row % p.groups * p.features;
  S kept[Kept][V];
  const auto x = [&](int64_t i, int k, S(&to)[V]) {
    if (k == Kept) return Row::load(p.x, base + i, to);
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] = kept[k][e];
  };
  Two<S> sum = {0, 0};
  for_each_vector<V, Kept>(p.features, [&](int64_t i, int k) {
    S v[V];
    Row::load(p.x, base + i, v);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += v[e];
    if (k == Kept) return;
#pragma unroll
    for (int e = 0; e < V; ++e) kept[k][e] = v[e];
  });
  const S count = static_cast<S>(p.features), mean = sum_of_block(sum, shared).a / count;
  sum = {0, 0};
  for_each_vector<V, Kept>(p.features, [&](int64_t i, int k) {
    S v[V];
    x(i, k, v);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += (v[e] - mean) * (v[e] - mean);
  });
  const S scale = 1 / sqrt(sum_of_block(sum, shared).a / count + static_cast<S>(p.epsilon));
  if (threadIdx.x == 0) {
    auto* stats = static_cast<S*>(p.stats) + 2 * row;
    stats[0] = mean, stats[1] = scale;
  }
  for_each_vector<V, Kept>(p.features, [&](int64_t i, int k) {
    S v[V], gain[V], shift[V], other[V];
    x(i, k, v);
    load_sums(p.gain, of_group + i, gain);
    load_sums(p.shift, of_group + i, shift);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = (v[e] - mean) * scale * gain[e] + shift[e];
    if (p.factor != nullptr) {
      Row::load(p.factor, base + i, other);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] *= other[e];
    }
    if (p.term != nullptr) {
      Row::load(p.term, base + i, other);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] += other[e];
    }
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = p.relu && v[e] < 0 ? S(0) : v[e];
    Row::store(p.y, base + i, v);
  });
}

// Of some elements: the gradient of z and of x^ gain + shift, and x^.
template <class T, int V>
struct Grads {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  S of_z[V], of_affine[V], normed[V];

  __device__ Grads(const Backward& p, int64_t at, S mean, S scale) {
    Row::load(p.x, at, normed);
    Row::load(p.dy, at, of_z);
#pragma unroll
    for (int e = 0; e < V; ++e) normed[e] = (normed[e] - mean) * scale;
    S other[V];
    if (p.relu) {
      Row::load(p.y, at, other);
#pragma unroll
      for (int e = 0; e < V; ++e) of_z[e] = other[e] > 0 ? of_z[e] : S(0);
    }
#pragma unroll
    for (int e = 0; e < V; ++e) of_affine[e] = of_z[e];
    if (p.factor == nullptr) return;
    Row::load(p.factor, at, other);
#pragma unroll
    for (int e = 0; e < V; ++e) of_affine[e] *= other[e];
  }
};

template <class T, int V, int Kept>
__global__ void __launch_bounds__(32 * kMostWarps, Kept == 2 ? 2 : 1)
    norm_backward(const __grid_constant__ Backward p) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  __shared__ Two<S> shared[kMostWarps];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x, base = row * p.features, of_group = row % p.groups * p.features;
  const S mean = static_cast<const S*>(p.stats)[2 * row], scale = static_cast<const S*>(p.stats)[2 * row + 1];
  S normed[Kept][V], scaled[Kept][V];  // x^, and its gradient
  Two<S> sum = {0, 0};
  const auto look = [&](int64_t i, S(&n)[V], S(&s)[V]) {
    const Grads<T, V> g(p, base + i, mean, scale);
    S gain[V];
    load_sums(p.gain, of_group + i, gain);
#pragma unroll
    for (int e = 0; e < V; ++e) n[e] = g.normed[e], s[e] = g.of_affine[e] * gain[e];
    return g;
  };
  for_each_vector<V, Kept>(p.features, [&](int64_t i, int k) {
    S n[V], s[V];
    const Grads<T, V> g = look(i, n, s);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += s[e], sum.b += s[e] * n[e];
    if (p.dterm != nullptr) Row::store(p.dterm, base + i, g.of_z);
    if (p.dfactor != nullptr) {
      S gain[V], shift[V];
      load_sums(p.gain, of_group + i, gain);
      load_sums(p.shift, of_group + i, shift);
#pragma unroll
      for (int e = 0; e < V; ++e) shift[e] = g.of_z[e] * (n[e] * gain[e] + shift[e]);
      Row::store(p.dfactor, base + i, shift);
    }
    if (k == Kept) return;
#pragma unroll
    for (int e = 0; e < V; ++e) normed[k][e] = n[e], scaled[k][e] = s[e];
  });
  sum = sum_of_block(sum, shared);
  const S first = sum.a / static_cast<S>(p.features), second = sum.b / static_cast<S>(p.features);
  for_each_vector<V, Kept>(p.features, [&](int64_t i, int k) {
    S n[V], s[V];
    if (k == Kept) {
      look(i, n, s);
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) n[e] = normed[k][e], s[e] = scaled[k][e];
    }
#pragma unroll
    for (int e = 0; e < V; ++e) s[e] = scale * (s[e] - first - n[e] * second);
    Row::store(p.dx, base + i, s);
  });
}

// Of the first kColumns threads of `split` thread blocks, in their order, to those of the first one.
template <class S>
__device__ inline Two<S> sum_of_cluster(Two<S> own, Two<S>* shared, int split) {
#if __CUDA_ARCH__ >= 900
  if (split == 1) return own;
  const auto cluster = cooperative_groups::this_cluster();
  __syncthreads();  // shared has been read
  if (threadIdx.x < kColumns) shared[threadIdx.x] = own;
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x < kColumns) {
    for (int other = 1; other < split; ++other) {
      const Two<S> theirs = cluster.map_shared_rank(shared, other)[threadIdx.x];
      own.a += theirs.a, own.b += theirs.b;
    }
  }
  cluster.sync();
#endif
  return own;
}

// A cluster of `split` thread blocks shares the tokens of a strip.
template <class T, int V>
__global__ void __launch_bounds__(32 * kColumnWarps) norm_columns(const __grid_constant__ Backward p, int split) {
  using S = SumOf<T>;
  __shared__ Two<S> shared[kColumnWarps][kColumns];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t strips = ceil_div(p.features, kColumns), place = blockIdx.x / split;
  const int64_t group = place / strips, first = place % strips * kColumns;
  const int rank = static_cast<int>(blockIdx.x) % split;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int part = 0; part < 2 / V; ++part) {
    const int column = part * 32 + lane * V;
    Two<S> sum[V] = {};
    if (first + column < p.features) {
#pragma unroll 4
      for (int64_t token = rank * kColumnWarps + warp; token < p.n; token += split * kColumnWarps) {
        const int64_t row = token * p.groups + group;
        const S mean = static_cast<const S*>(p.stats)[2 * row], scale = static_cast<const S*>(p.stats)[2 * row + 1];
        const Grads<T, V> g(p, row * p.features + first + column, mean, scale);
#pragma unroll
        for (int e = 0; e < V; ++e) sum[e].a += g.of_affine[e] * g.normed[e], sum[e].b += g.of_affine[e];
      }
    }
#pragma unroll
    for (int e = 0; e < V; ++e) shared[warp][column + e] = sum[e];
  }
  __syncthreads();
  const auto column = static_cast<int64_t>(threadIdx.x);
  Two<S> sum = {0, 0};
  if (column < kColumns) {
    for (int w = 0; w < kColumnWarps; ++w) sum.a += shared[w][column].a, sum.b += shared[w][column].b;
  }
  sum = sum_of_cluster(sum, shared[0], split);
  if (rank != 0 || column >= kColumns || first + column >= p.features) return;
  static_cast<S*>(p.dgain)[group * p.features + first + column] = sum.a;
  static_cast<S*>(p.dshift)[group * p.features + first + column] = sum.b;
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// Two vectors a thread as far as thread blocks go: few registers, so that several rows are under way on an SM.
int threads_for_row(int64_t features, int vector) {
  const int64_t vectors = ceil_div(features, vector);
  return static_cast<int>(std::clamp<int64_t>(ceil_div(vectors / 2, 32), 1, kMostWarps)) * 32;
}

bool fits(int64_t features, int vector) { return features <= int64_t{2} * 32 * kMostWarps * vector; }

template <class T>
Status prepare_type() {
  constexpr int V = kVector<T>;
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, V, 2>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, V, 5>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, 1, 2>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_backward<T, V, 2>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_backward<T, V, 5>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_backward<T, 1, 2>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_columns<T, 2>, 0)));
  return cuda::prepare(norm_columns<T, 1>, 0);
}

Status prepare_types() {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const Status status = with_type(dtype, [&]<class T>() { return prepare_type<T>(); });
    BS_RETURN_IF_ERROR(status);
  }
  return {};
}

// Whether kernels of the current device may begin before the one in front has ended; the first call loads them.
Result<bool> prepared(Device device, const cuda::Card& card) {
  static cuda::KnownPerDevice overlaps;
  return overlaps(device, [&]() -> Result<bool> {
    BS_RETURN_IF_ERROR(prepare_types());
    BS_RETURN_IF_ERROR(prepare_wide(card));
    BS_RETURN_IF_ERROR(prepare_cell(card));
    return cuda::has_griddepcontrol(norm_forward<float, 1, 2>);
  });
}

// A thread block has a row.
Status check_rows(std::string_view op, int64_t rows) {
  constexpr int64_t kMost = 0x7fffffff;
  return rows <= kMost ? Status() : invalid("[", op, "] x has ", rows, " rows, a card takes ", kMost);
}

}  // namespace

Result<CudaPlace> place_of(Device device, Stream stream) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto overlap = prepared(device, *card);
  if (!overlap.ok()) return overlap.status();
  return CudaPlace{*card, static_cast<cudaStream_t>(stream.handle), *overlap};
}

Status cuda_forward(const Forward& f, Device device, Stream stream) {
  if (f.n == 0) return {};
  BS_RETURN_IF_ERROR(check_rows("layer_norm_forward", f.rows()));
  return on_device(device, stream, [&](const CudaPlace& place) {
    if (wide_takes(f, place)) return launch_wide(f, place);
    return with_type(f.dtype, [&]<class T>() {
      const bool wide = aligned(f.features, kVector<T>, {f.x, f.gain, f.shift, f.factor, f.term, f.y});
      const int vector = wide ? kVector<T> : 1;
      return cuda::launch({.blocks = f.rows(),
                           .threads = threads_for_row(f.features, vector),
                           .stream = place.stream,
                           .overlap = place.overlap},
                          !wide                      ? norm_forward<T, 1, 2>
                          : fits(f.features, vector) ? norm_forward<T, kVector<T>, 2>
                                                     : norm_forward<T, kVector<T>, 5>,
                          f);
    });
  });
}

Status cuda_backward(const Backward& b, Device device, Stream stream) {
  BS_RETURN_IF_ERROR(check_rows("layer_norm_backward", b.rows()));
  return on_device(device, stream, [&](const CudaPlace& place) {
    return with_type(b.dtype, [&]<class T>() -> Status {
      const auto tensors = {b.x,
                            b.gain,
                            b.shift,
                            b.factor,
                            b.y,
                            b.dy,
                            static_cast<const void*>(b.dx),
                            static_cast<const void*>(b.dfactor),
                            static_cast<const void*>(b.dterm)};
      const bool wide = aligned(b.features, kVector<T>, tensors), pairs = aligned(b.features, 2, tensors);
      const int vector = wide ? kVector<T> : 1;
      if (b.n > 0 && b.dx != nullptr) {
        BS_RETURN_IF_ERROR(cuda::launch({.blocks = b.rows(),
                                         .threads = threads_for_row(b.features, vector),
                                         .stream = place.stream,
                                         .overlap = place.overlap},
                                        !wide                      ? norm_backward<T, 1, 2>
                                        : fits(b.features, vector) ? norm_backward<T, kVector<T>, 2>
                                                                   : norm_backward<T, kVector<T>, 5>,
                                        b));
      }
      if (b.dgain == nullptr) return {};
      const int split = place.overlap && b.n >= 1024 ? 8 : 1;  // a strip alone leaves SMs idle
      return cuda::launch({.blocks = ceil_div(b.features, kColumns) * b.groups * split,
                           .threads = 32 * kColumnWarps,
                           .stream = place.stream,
                           .overlap = place.overlap,
                           .cluster = split},
                          pairs ? norm_columns<T, 2> : norm_columns<T, 1>, b, split);
    });
  });
}

Status prepare_cuda(Device device) {
  return on_device(device, {}, [](const CudaPlace&) { return Status(); });
}

}  // namespace blocksparse::norm
