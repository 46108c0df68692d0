#include "ops/lstm/cuda/cell.h"

#include <algorithm>

#include "blocksparse/status.h"
#include "core/ceil_div.h"
#include "cuda/gates.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::lstm {
namespace {

constexpr int kCellThreads = 256;

template <class T>
inline constexpr int kUnits = sizeof(T) == 8 ? 2 : 4;  // that a thread takes; f32: 16 bytes

__device__ inline int64_t length_of(const CellStep& s, int64_t token) {
  return s.lengths == nullptr ? s.steps : max(int64_t{0}, min(s.lengths[token], s.steps));
}

template <class T>
__device__ inline T* at_or_null(T* data, int64_t offset) {
  return data == nullptr ? nullptr : data + offset;
}

// Thread i of a step has V units of one token.
struct Spot {
  int64_t token, unit, at, at4;  // at: in [n, H]; at4: of the first gate in [n, 4, H]
  __device__ Spot(int64_t i, int64_t hidden, int units) {
    const int64_t columns = hidden / units;
    // A 64-bit quotient takes longer than the rest of a step.
    token = i < int64_t{1} << 32 ? static_cast<uint32_t>(i) / static_cast<uint32_t>(columns) : i / columns;
    unit = (i - token * columns) * units;
    at = token * hidden + unit;
    at4 = at + token * (kGates - 1) * hidden;
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kCellThreads) forward_cell(const __grid_constant__ ForwardCell p) {
  using S = SumOf<T>;
  using Row = Units<T, V>;
  using State = Units<S, V>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t i = blockIdx.x * int64_t{kCellThreads} + threadIdx.x;
  if (i >= p.n * (p.hidden / V)) return;
  const Spot spot(i, p.hidden, V);
  T* y = static_cast<T*>(p.y) + spot.at;
  S* c = static_cast<S*>(p.c) + spot.at;
  T* kept = at_or_null(static_cast<T*>(p.gates), spot.at4);
  const int64_t length = length_of(p, spot.token);
  if (p.t >= length) {
    Row::zero(y);
    if (kept == nullptr) return;
    State::zero(c);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) Row::zero(kept + gate * p.hidden);
    return;
  }
  S z[kGates][V], sums[kGates][V] = {}, cell[V] = {}, h[V];
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    Row::load(static_cast<const T*>(p.pre) + spot.at4 + gate * p.hidden, z[gate]);
    if (p.sums != nullptr) Row::load(static_cast<const T*>(p.sums) + spot.at4 + gate * p.hidden, sums[gate]);
  }
  if (p.c_before != nullptr) State::load(static_cast<const S*>(p.c_before) + spot.at, cell);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    S gates[kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) gates[gate] = z[gate][v] + sums[gate][v];
    h[v] = forward_unit<T>(gates, cell[v]);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) z[gate][v] = gates[gate];
  }
  State::store(c, cell);
  Row::store(y, h);
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    if (kept != nullptr) Row::store(kept + gate * p.hidden, z[gate]);
  }
  if (p.t != length - 1) return;
  if (p.h_end != nullptr) Row::store(static_cast<T*>(p.h_end) + spot.at, h);
  if (p.c_end != nullptr) State::store(static_cast<S*>(p.c_end) + spot.at, cell);
}

template <class T, int V>
__global__ void __launch_bounds__(kCellThreads) backward_cell(const __grid_constant__ BackwardCell p) {
  using S = SumOf<T>;
  using Row = Units<T, V>;
  using State = Units<S, V>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t i = blockIdx.x * int64_t{kCellThreads} + threadIdx.x;
  if (i >= p.n * (p.hidden / V)) return;
  const Spot spot(i, p.hidden, V);
  T* dpre = static_cast<T*>(p.dpre) + spot.at4;
  const int64_t length = length_of(p, spot.token);
  if (p.t >= length) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) Row::zero(dpre + gate * p.hidden);
    return;
  }
  const bool ends = p.t == length - 1;
  S gates[kGates][V], c[V], before[V] = {}, dh[V] = {}, dc[V] = {};
  const auto add = [&](const void* of) {
    if (of == nullptr) return;
    S more[V];
    Row::load(static_cast<const T*>(of) + spot.at, more);
#pragma unroll
    for (int v = 0; v < V; ++v) dh[v] += more[v];
  };
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    Row::load(static_cast<const T*>(p.gates) + spot.at4 + gate * p.hidden, gates[gate]);
  }
  State::load(static_cast<const S*>(p.c) + spot.at, c);
  if (p.c_before != nullptr) State::load(static_cast<const S*>(p.c_before) + spot.at, before);
  const void* dc_behind = ends ? p.dc_end : p.dc;
  if (dc_behind != nullptr) State::load(static_cast<const S*>(dc_behind) + spot.at, dc);
  add(p.sums);
  add(p.dy);
  if (ends) add(p.dh_end);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    S of_unit[kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) of_unit[gate] = gates[gate][v];
    dc[v] = backward_unit<T>(of_unit, c[v], before[v], dh[v], dc[v]);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) gates[gate][v] = of_unit[gate];
  }
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) Row::store(dpre + gate * p.hidden, gates[gate]);
  State::store(static_cast<S*>(p.dc) + spot.at, dc);
}

template <class T>
__global__ void __launch_bounds__(kCellThreads) copy_of_empty(const __grid_constant__ CopyOfEmpty p) {
  const int64_t i = blockIdx.x * int64_t{kCellThreads} + threadIdx.x;
  if (i >= p.n * p.hidden || (p.lengths != nullptr && p.lengths[i / p.hidden] > 0)) return;
  static_cast<T*>(p.to)[i] = p.from == nullptr ? T{} : static_cast<const T*>(p.from)[i];
}

template <class T, int V>
__global__ void __launch_bounds__(kCellThreads) multiply(const __grid_constant__ Multiply p) {
  using S = SumOf<T>;
  using Row = Units<T, V>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t i = (blockIdx.x * int64_t{kCellThreads} + threadIdx.x) * V;
  if (i >= p.count) return;
  S x[V], other[V];
  Row::load(static_cast<const T*>(p.x) + i, x);
  const auto product = [&](const void* of, void* to) {
    Row::load(static_cast<const T*>(of) + i, other);
#pragma unroll
    for (int v = 0; v < V; ++v) other[v] *= x[v];
    Row::store(static_cast<T*>(to) + i, other);
  };
  product(p.a, p.of_a);
  if (p.of_b != nullptr) product(p.b, p.of_b);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class Body>
Status with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<Bf16>();
    case DType::f16: break;
  }
  return body.template operator()<F16>();
}

// Rows are multiples of 8 elements, so the beginnings of tensors decide.
bool aligned(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

cuda::Launch launch_of(int64_t threads, bool overlap, void* stream) {
  return {.blocks = ceil_div(threads, kCellThreads),
          .threads = kCellThreads,
          .stream = static_cast<cudaStream_t>(stream),
          .overlap = overlap};
}

template <class T>
Status prepare_type() {
  BS_RETURN_IF_ERROR(cuda::prepare(forward_cell<T, kUnits<T>>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(forward_cell<T, 1>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(backward_cell<T, kUnits<T>>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(backward_cell<T, 1>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(multiply<T, kUnits<T>>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(multiply<T, 1>, 0));
  return cuda::prepare(copy_of_empty<T>, 0);
}

}  // namespace

Status launch_cell(const ForwardCell& s, DType dtype, bool overlap, void* stream) {
  const bool wide = aligned({s.pre, s.sums, s.c_before, s.c, s.y, s.gates, s.h_end, s.c_end});
  if (s.n == 0 || s.hidden == 0) return {};
  return with_type(dtype, [&]<class T>() {
    const int units = wide ? kUnits<T> : 1;
    const auto kernel = wide ? forward_cell<T, kUnits<T>> : forward_cell<T, 1>;
    return cuda::launch(launch_of(s.n * (s.hidden / units), overlap, stream), kernel, s);
  });
}

Status launch_cell(const BackwardCell& s, DType dtype, bool overlap, void* stream) {
  const bool wide = aligned({s.gates, s.c, s.c_before, s.sums, s.dy, s.dh_end, s.dc_end, s.dc, s.dpre});
  if (s.n == 0 || s.hidden == 0) return {};
  return with_type(dtype, [&]<class T>() {
    const int units = wide ? kUnits<T> : 1;
    const auto kernel = wide ? backward_cell<T, kUnits<T>> : backward_cell<T, 1>;
    return cuda::launch(launch_of(s.n * (s.hidden / units), overlap, stream), kernel, s);
  });
}

Status launch_copy(const CopyOfEmpty& copy, DType dtype, void* stream) {
  if (copy.n == 0 || copy.hidden == 0 || copy.to == nullptr) return {};
  return with_type(dtype, [&]<class T>() {
    return cuda::launch(launch_of(copy.n * copy.hidden, false, stream), copy_of_empty<T>, copy);
  });
}

Status launch_multiply(const Multiply& m, DType dtype, bool overlap, void* stream) {
  if (m.count == 0) return {};
  const bool wide = aligned({m.x, m.a, m.b, m.of_a, m.of_b});
  return with_type(dtype, [&]<class T>() {
    const int units = wide ? kUnits<T> : 1;
    return cuda::launch(launch_of(m.count / units, overlap, stream), wide ? multiply<T, kUnits<T>> : multiply<T, 1>, m);
  });
}

Status prepare_cells() {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    const Status status = with_type(dtype, [&]<class T>() { return prepare_type<T>(); });
    BS_RETURN_IF_ERROR(status);
  }
  return {};
}

bool cells_overlap() { return cuda::has_griddepcontrol(forward_cell<Bf16, kUnits<Bf16>>); }

}  // namespace blocksparse::lstm
