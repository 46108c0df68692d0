// The norm of four gates and a step of the LSTM's cell. One kernel finds the statistics (rows.cu) and one does the
// rest, so the normalised gates exist in registers alone. A thread has some units of two tokens.
#include "core/ceil_div.h"
#include "cuda/gates.cuh"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/vector.cuh"

namespace blocksparse::norm {
namespace {

constexpr int kThreads = 256, kTokens = 2;

// Units of a thread.
template <class T>
inline constexpr int kUnits = sizeof(T) == 2 ? 4 : kVector<T>;

template <class T, int V>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 3) norm_cell(const __grid_constant__ CellForward p) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto strips = static_cast<uint32_t>(ceil_div(p.features, kThreads * V)), pair = blockIdx.x / strips;
  const int64_t unit = ((blockIdx.x - pair * strips) * int64_t{kThreads} + threadIdx.x) * V;
  const int64_t first = int64_t{pair} * kTokens;
  if (unit >= p.features) return;
  const auto at = [&](int t) { return (first + t) * p.features + unit; };
  const auto at_gate = [&](int t, int g) { return ((first + t) * kGates + g) * p.features + unit; };
  // All loads from memory start before the first value is used.
  typename Row::Packed z[kTokens][kGates];
  S c[kTokens][V] = {}, gain[kGates][V], shift[kGates][V];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (first + t >= p.n) continue;
#pragma unroll
    for (int g = 0; g < kGates; ++g) z[t][g] = Row::load(p.z, at_gate(t, g));
    if (p.c_before != nullptr) load_sums(p.c_before, at(t), c[t]);
  }
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    load_sums(p.gain, g * p.features + unit, gain[g]);
    load_sums(p.shift, g * p.features + unit, shift[g]);
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (first + t >= p.n) continue;
    S h[V], gates[kGates][V];
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const auto* stats = static_cast<const S*>(p.stats) + 2 * ((first + t) * kGates + g);
#pragma unroll
      for (int e = 0; e < V; ++e) gates[g][e] = (z[t][g].at(e) - stats[0]) * stats[1] * gain[g][e] + shift[g][e];
    }
#pragma unroll
    for (int e = 0; e < V; ++e) {
      S of_unit[kGates];
#pragma unroll
      for (int g = 0; g < kGates; ++g) of_unit[g] = gates[g][e];
      h[e] = lstm::forward_unit<T>(of_unit, c[t][e]);
#pragma unroll
      for (int g = 0; g < kGates; ++g) gates[g][e] = of_unit[g];
    }
    Row::store(p.h, at(t), h);
    store_sums(p.c, at(t), c[t]);
    if (p.h_end != nullptr) Row::store(p.h_end, at(t), h);
    if (p.c_end != nullptr) store_sums(p.c_end, at(t), c[t]);
    if (p.gates == nullptr) continue;
#pragma unroll
    for (int g = 0; g < kGates; ++g) Row::store(p.gates, at_gate(t, g), gates[g]);
  }
}

template <class T, int V>
Status launch(const CellForward& f, const CudaPlace& place) {
  return cuda::launch({.blocks = ceil_div(f.features, kThreads * V) * ceil_div(f.n, kTokens),
                       .threads = kThreads,
                       .stream = place.stream,
                       .overlap = place.overlap},
                      norm_cell<T, V>, f);
}

}  // namespace

Status prepare_cell() {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    BS_RETURN_IF_ERROR(with_type(dtype, [&]<class T>() -> Status {
      BS_RETURN_IF_ERROR((cuda::prepare(norm_cell<T, kUnits<T>>, 0)));
      return cuda::prepare(norm_cell<T, 1>, 0);
    }));
  }
  return {};
}

Status cuda_cell_forward(const CellForward& f, Device device, Stream stream) {
  constexpr int64_t kMost = 0x7fffffff / kGates;
  if (f.n == 0) return {};
  if (f.n > kMost) return invalid("[deep_update] z has ", f.n, " tokens, a card takes at most ", kMost);
  return on_device(device, stream, [&](const CudaPlace& place) -> Status {
    Forward of_gates;
    of_gates.dtype = f.dtype;
    of_gates.n = f.n;
    of_gates.groups = kGates;
    of_gates.features = f.features;
    of_gates.epsilon = f.epsilon;
    of_gates.x = f.z;
    of_gates.stats = f.stats;
    BS_RETURN_IF_ERROR(launch_forward(of_gates, place));
    return with_type(f.dtype, [&]<class T>() {
      const bool wide =
          aligned(f.features, kUnits<T>, {f.z, f.gain, f.shift, f.c_before, f.h, f.c, f.gates, f.h_end, f.c_end});
      return wide ? launch<T, kUnits<T>>(f, place) : launch<T, 1>(f, place);
    });
  });
}

}  // namespace blocksparse::norm
