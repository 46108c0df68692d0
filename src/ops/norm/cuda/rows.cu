// The layer norm on a card: a thread block for each row.
//   A row stays packed in registers from its first reading on; elements that do not fit are read again from L1 and L2.
//   An SM holds two thread blocks or more, so that one computes while another waits for memory. NOTES.md has the slower
//   forms: clusters that share a row, and rows that share gain and shift in shared memory.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cuda/once.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/vector.cuh"

namespace blocksparse::norm {
namespace {

constexpr int most_threads(int kept) { return kept == 2 ? 32 * kMostWarps : kept == 6 ? 384 : 256; }
constexpr int resident(int kept) { return kept == 6 ? 2 : 3; }  // thread blocks of an SM

// Calls body(i, k) for this thread's vectors: i is the first element and k the number of the vector. Vectors from
// number Kept on are not in registers.
template <int V, int Kept, class Body>
__device__ inline void for_each_vector(int64_t features, Body body) {
  const int step = static_cast<int>(blockDim.x) * V, first = static_cast<int>(threadIdx.x) * V;
#pragma unroll
  for (int k = 0; k < Kept; ++k) {
    if (first + k * step < features) body(first + k * step, k);
  }
#pragma unroll 1
  for (int i = first + Kept * step; i < features; i += step) body(i, Kept);
}

// The remainder is of 32 bits, because a 64-bit quotient takes longer than a row of few features.
__device__ inline int64_t group_of_row(int64_t groups) { return blockIdx.x % static_cast<uint32_t>(groups); }

template <class T, int V, int Kept>
__global__ void __launch_bounds__(most_threads(Kept), resident(Kept)) norm_forward(const __grid_constant__ Forward p) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  using Packed = typename Row::Packed;
  __shared__ Two<S> sums[kMostWarps], squares[kMostWarps];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x, base = row * p.features;
  Packed kept[Kept];
#pragma unroll
  for (int k = 0; k < Kept; ++k) {  // all loads before the first use
    const int i = static_cast<int>(threadIdx.x + k * blockDim.x) * V;
    kept[k] = i < p.features ? Row::load(p.x, base + i) : Packed{};
  }
  const auto x = [&](int i, int k) { return k == Kept ? Row::load(p.x, base + i) : kept[k]; };
  Two<S> sum = {0, 0};
  for_each_vector<V, Kept>(p.features, [&](int i, int k) {
    const Packed v = x(i, k);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += v.at(e);
  });
  const S count = static_cast<S>(p.features), mean = sum_of_block(sum, sums).a / count;
#pragma unroll
  for (Packed& packed : kept) packed.stay_packed();
  sum = {0, 0};
  for_each_vector<V, Kept>(p.features, [&](int i, int k) {
    const Packed v = x(i, k);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += (v.at(e) - mean) * (v.at(e) - mean);
  });
  const S scale = 1 / sqrt(sum_of_block(sum, squares).a / count + static_cast<S>(p.epsilon));
  if (threadIdx.x == 0) {
    auto* stats = static_cast<S*>(p.stats) + 2 * row;
    stats[0] = mean, stats[1] = scale;
  }
  if (p.y == nullptr) return;
#pragma unroll
  for (Packed& packed : kept) packed.stay_packed();
  const int64_t of_group = group_of_row(p.groups) * p.features;
  for_each_vector<V, Kept>(p.features, [&](int i, int k) {
    S v[V], gain[V], shift[V];
    const Packed packed = x(i, k);
    load_sums(p.gain, of_group + i, gain);
    load_sums(p.shift, of_group + i, shift);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = (packed.at(e) - mean) * scale * gain[e] + shift[e];
    if (p.factor != nullptr) {
      const Packed other = Row::load(p.factor, base + i);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] *= other.at(e);
    }
    if (p.term != nullptr) {
      const Packed other = Row::load(p.term, base + i);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] += other.at(e);
    }
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = p.relu && v[e] < 0 ? S(0) : v[e];
    Row::store(p.y, base + i, v);
  });
}

// x and the gradient of z stay in registers; factor and gain are read twice.
template <class T, int V, int Kept>
__global__ void __launch_bounds__(most_threads(Kept), 2) norm_backward(const __grid_constant__ Backward p) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  using Packed = typename Row::Packed;
  __shared__ Two<S> shared[kMostWarps];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t row = blockIdx.x, base = row * p.features, of_group = group_of_row(p.groups) * p.features;
  const S mean = static_cast<const S*>(p.stats)[2 * row], scale = static_cast<const S*>(p.stats)[2 * row + 1];
  Packed kept_x[Kept], kept_dz[Kept];
#pragma unroll
  for (int k = 0; k < Kept; ++k) {  // all loads before the first use
    const int i = static_cast<int>(threadIdx.x + k * blockDim.x) * V;
    kept_x[k] = i < p.features ? Row::load(p.x, base + i) : Packed{};
    kept_dz[k] = i < p.features ? Row::load(p.dy, base + i) : Packed{};
  }
  if (p.relu) {
    Packed y[Kept];
#pragma unroll
    for (int k = 0; k < Kept; ++k) {
      const int i = static_cast<int>(threadIdx.x + k * blockDim.x) * V;
      y[k] = i < p.features ? Row::load(p.y, base + i) : Packed{};
    }
#pragma unroll
    for (int k = 0; k < Kept; ++k) cut_where_zero<V>(y[k], kept_dz[k]);
  }
  const auto x = [&](int i, int k) { return k == Kept ? Row::load(p.x, base + i) : kept_x[k]; };
  const auto dz = [&](int i, int k) { return k == Kept ? grad_of_z<T, V>(p, base + i) : kept_dz[k]; };
  // Computes x^ and its gradient.
  const auto look = [&](int i, const Packed& x, const Packed& dz, S(&normed)[V], S(&of_normed)[V]) {
    load_sums(p.gain, of_group + i, of_normed);
#pragma unroll
    for (int e = 0; e < V; ++e) normed[e] = (x.at(e) - mean) * scale, of_normed[e] *= dz.at(e);
    if (p.factor == nullptr) return;
    const Packed factor = Row::load(p.factor, base + i);
#pragma unroll
    for (int e = 0; e < V; ++e) of_normed[e] *= factor.at(e);
  };
  Two<S> sum = {0, 0};
  for_each_vector<V, Kept>(p.features, [&](int i, int k) {
    S normed[V], of_normed[V];
    const Packed of_z = dz(i, k);
    look(i, x(i, k), of_z, normed, of_normed);
#pragma unroll
    for (int e = 0; e < V; ++e) sum.a += of_normed[e], sum.b += of_normed[e] * normed[e];
    if (p.dterm != nullptr) Row::store(p.dterm, base + i, of_z);
    if (p.dfactor == nullptr) return;
    S gain[V], shift[V];
    load_sums(p.gain, of_group + i, gain);
    load_sums(p.shift, of_group + i, shift);
#pragma unroll
    for (int e = 0; e < V; ++e) shift[e] = of_z.at(e) * (normed[e] * gain[e] + shift[e]);
    Row::store(p.dfactor, base + i, shift);
  });
  sum = sum_of_block(sum, shared);
#pragma unroll
  for (Packed& packed : kept_x) packed.stay_packed();
#pragma unroll
  for (Packed& packed : kept_dz) packed.stay_packed();
  const S first = sum.a / static_cast<S>(p.features), second = sum.b / static_cast<S>(p.features);
  for_each_vector<V, Kept>(p.features, [&](int i, int k) {
    S normed[V], dx[V];
    look(i, x(i, k), dz(i, k), normed, dx);
#pragma unroll
    for (int e = 0; e < V; ++e) dx[e] = scale * (dx[e] - first - normed[e] * second);
    Row::store(p.dx, base + i, dx);
  });
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// How a row is divided: how many vectors of a thread stay in registers, and how many threads there are.
struct RowPlan {
  int kept, threads;
};

// Two vectors a thread as far as a thread block can grow, so that an SM has several rows under way. Longer rows get
// thread blocks of 384; or of 256, if there are rows enough for three on every SM.
RowPlan plan_row(int64_t features, int vector, int64_t rows, const cuda::Card& card) {
  const int64_t vectors = ceil_div(features, vector);
  const auto threads = [&](int64_t each, int64_t most) {
    return static_cast<int>(std::clamp<int64_t>(ceil_div(ceil_div(vectors, each), 32), 1, most / 32)) * 32;
  };
  if (vectors <= 2 * most_threads(2)) return {2, threads(2, most_threads(2))};
  if (vectors <= 10 * most_threads(10) && rows >= 3 * card.multiprocessors) return {10, threads(10, most_threads(10))};
  return {6, threads(6, most_threads(6))};
}

template <class T, int V>
Status prepare_vector() {
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, V, 2>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, V, 6>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_forward<T, V, 10>, 0)));
  BS_RETURN_IF_ERROR((cuda::prepare(norm_backward<T, V, 2>, 0)));
  return cuda::prepare(norm_backward<T, V, 6>, 0);
}

Status prepare_rows() {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    BS_RETURN_IF_ERROR(with_type(dtype, [&]<class T>() -> Status {
      BS_RETURN_IF_ERROR((prepare_vector<T, kVector<T>>()));
      return prepare_vector<T, 1>();
    }));
  }
  return {};
}

// Whether kernels of the current device may begin before the kernel in front has ended. The first call loads them.
Result<bool> prepared(Device device) {
  static cuda::KnownPerDevice overlaps;
  return overlaps(device, [&]() -> Result<bool> {
    BS_RETURN_IF_ERROR(prepare_rows());
    BS_RETURN_IF_ERROR(prepare_columns());
    BS_RETURN_IF_ERROR(prepare_cell());
    return cuda::has_griddepcontrol(norm_forward<float, 1, 2>);
  });
}

// Checks that a grid can have a thread block for each row.
Status check_rows(std::string_view op, int64_t rows, int64_t features) {
  constexpr int64_t kMost = 0x7fffffff, kMostFeatures = 1 << 30;
  if (features > kMostFeatures)
    return invalid("[", op, "] x has ", features, " features, a card takes at most ", kMostFeatures);
  return rows <= kMost ? Status() : invalid("[", op, "] x has ", rows, " rows, a card takes at most ", kMost);
}

}  // namespace

Result<CudaPlace> place_of(Device device, Stream stream) {
  const auto card = cuda::card_of(device);
  if (!card.ok()) return card.status();
  const auto overlap = prepared(device);
  if (!overlap.ok()) return overlap.status();
  return CudaPlace{*card, static_cast<cudaStream_t>(stream.handle), *overlap};
}

Status launch_forward(const Forward& f, const CudaPlace& place) {
  return with_type(f.dtype, [&]<class T>() {
    const auto launch = [&]<int V>() {
      const RowPlan plan = plan_row(f.features, V, f.rows(), place.card);
      return cuda::launch(
          {.blocks = f.rows(), .threads = plan.threads, .stream = place.stream, .overlap = place.overlap},
          plan.kept == 2   ? norm_forward<T, V, 2>
          : plan.kept == 6 ? norm_forward<T, V, 6>
                           : norm_forward<T, V, 10>,
          f);
    };
    const bool wide = aligned(f.features, kVector<T>, {f.x, f.gain, f.shift, f.factor, f.term, f.y});
    return wide ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

Status cuda_forward(const Forward& f, Device device, Stream stream) {
  if (f.n == 0) return {};
  BS_RETURN_IF_ERROR(check_rows("layer_norm_forward", f.rows(), f.features));
  return on_device(device, stream, [&](const CudaPlace& place) { return launch_forward(f, place); });
}

Status cuda_backward(const Backward& b, Device device, Stream stream) {
  BS_RETURN_IF_ERROR(check_rows("layer_norm_backward", b.rows(), b.features));
  return on_device(device, stream, [&](const CudaPlace& place) {
    return with_type(b.dtype, [&]<class T>() -> Status {
      const auto launch = [&]<int V>() {
        const RowPlan plan = plan_row(b.features, V, 0, place.card);
        return cuda::launch(
            {.blocks = b.rows(), .threads = plan.threads, .stream = place.stream, .overlap = place.overlap},
            plan.kept == 2 ? norm_backward<T, V, 2> : norm_backward<T, V, 6>, b);
      };
      const bool wide =
          aligned(b.features, kVector<T>, {b.x, b.gain, b.shift, b.factor, b.y, b.dy, b.dx, b.dfactor, b.dterm});
      if (b.n > 0 && b.dx != nullptr) {
        BS_RETURN_IF_ERROR(wide ? launch.template operator()<kVector<T>>() : launch.template operator()<1>());
      }
      return b.dgain == nullptr ? Status() : launch_columns(b, place);
    });
  });
}

Status prepare_cuda(Device device) {
  return on_device(device, {}, [](const CudaPlace&) { return Status(); });
}

}  // namespace blocksparse::norm
