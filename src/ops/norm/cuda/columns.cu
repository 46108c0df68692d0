// dgain and dshift of the layer norm: sums over all tokens of each column.
//   A thread block has a strip of columns of a group. Each of its 32 lanes has a vector of columns, and its warps share
//   the tokens. Where strips alone leave SMs idle, a cluster of up to eight thread blocks shares the tokens further.
//   Sums are added in the order of warps, then of thread blocks.
#include <cooperative_groups.h>

#include "core/ceil_div.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/norm/cuda/launch.cuh"
#include "ops/norm/cuda/vector.cuh"

namespace blocksparse::norm {
namespace {

constexpr int kWarps = 8;

template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps) norm_columns(const __grid_constant__ Backward p, int split) {
  using S = SumOf<T>;
  using Row = Vector<T, V>;
  using Packed = typename Row::Packed;
  constexpr int kColumns = 32 * V;
  __shared__ Two<S> shared[kWarps][kColumns];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t strips = ceil_div(p.features, kColumns), place = blockIdx.x / split;
  const int64_t group = place / strips, first = place % strips * kColumns;
  const int rank = static_cast<int>(blockIdx.x) % split;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t column = first + lane * V;
  Two<S> sum[V] = {};
  if (column < p.features) {
#pragma unroll 4
    for (int64_t token = rank * kWarps + warp; token < p.n; token += split * kWarps) {
      const int64_t row = token * p.groups + group, at = row * p.features + column;
      const S mean = static_cast<const S*>(p.stats)[2 * row], scale = static_cast<const S*>(p.stats)[2 * row + 1];
      const Packed x = Row::load(p.x, at), dz = grad_of_z<T, V>(p, at);
      S of_affine[V];
#pragma unroll
      for (int e = 0; e < V; ++e) of_affine[e] = dz.at(e);
      if (p.factor != nullptr) {
        const Packed factor = Row::load(p.factor, at);
#pragma unroll
        for (int e = 0; e < V; ++e) of_affine[e] *= factor.at(e);
      }
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e].a += of_affine[e] * ((x.at(e) - mean) * scale), sum[e].b += of_affine[e];
    }
  }
#pragma unroll
  for (int e = 0; e < V; ++e) shared[warp][lane * V + e] = sum[e];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kColumns; c += 32 * kWarps) {
    for (int w = 1; w < kWarps; ++w) shared[0][c].a += shared[w][c].a, shared[0][c].b += shared[w][c].b;
  }
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (split > 1) cluster.sync();
  else __syncthreads();
#else
  __syncthreads();
#endif
  // From here on each thread block of the cluster has columns of its own.
  for (int c = rank * 32 * kWarps + static_cast<int>(threadIdx.x); c < kColumns; c += split * 32 * kWarps) {
    Two<S> all = shared[0][c];
#if __CUDA_ARCH__ >= 900
    if (split > 1) {
      all = {0, 0};
      for (int r = 0; r < split; ++r) {
        const Two<S> part = cluster.map_shared_rank(shared[0], r)[c];
        all.a += part.a, all.b += part.b;
      }
    }
#endif
    if (first + c >= p.features) break;
    static_cast<S*>(p.dgain)[group * p.features + first + c] = all.a;
    static_cast<S*>(p.dshift)[group * p.features + first + c] = all.b;
  }
#if __CUDA_ARCH__ >= 900
  if (split > 1) cluster.sync();  // shared memory must stay until all have read it
#endif
}

}  // namespace

// A cluster grows until the thread blocks fill two rounds of the card, while each warp has eight tokens or more.
Status launch_columns(const Backward& b, const CudaPlace& place) {
  return with_type(b.dtype, [&]<class T>() {
    const auto launch = [&]<int V>() {
      const int64_t strips = ceil_div(b.features, int64_t{32} * V) * b.groups;
      int split = 1;
      while (place.overlap && split < 8 && strips * split < 2 * place.card.multiprocessors &&
             b.n >= int64_t{16} * split * kWarps) {
        split *= 2;
      }
      return cuda::launch({.blocks = strips * split,
                           .threads = 32 * kWarps,
                           .stream = place.stream,
                           .overlap = place.overlap,
                           .cluster = split},
                          norm_columns<T, V>, b, split);
    };
    const bool wide = aligned(b.features, kVector<T>, {b.x, b.factor, b.y, b.dy});
    return wide ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

Status prepare_columns() {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    BS_RETURN_IF_ERROR(with_type(dtype, [&]<class T>() -> Status {
      BS_RETURN_IF_ERROR((cuda::prepare(norm_columns<T, kVector<T>>, 0)));
      return cuda::prepare(norm_columns<T, 1>, 0);
    }));
  }
  return {};
}

}  // namespace blocksparse::norm
