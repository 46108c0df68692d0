// All steps of the forward pass in one launch: y[t] = cell(pre[t] + y[t - 1] W^T), W in blocks of 32 and more
//   pre [steps, n, 4, H]   w [blocks, b, b]   y [steps, n, H]   16-bit elements, sums and c in f32, n <= 64
// Who does what
//   grid      one thread block an SM, all of them resident, because they wait for one another
//   strip     32 units. Thread blocks take strips in the order of their lists' lengths, back and forth
//   warp      8 units of a strip, all four gates, of `Tokens` sequences; its part of c stays in registers
//   W         stays in shared memory, in the order of mma's fragments, if it fits; the rest is read in each step
//   h         goes through y. A strip that has stored h counts this in `arrivals`, and readers wait for the count. So
//             there is no barrier of all thread blocks. No step writes where another step reads
// Gates whose lists differ are multiplied one by one, with W from memory: right, but slow. NOTES.md has the times.
#include "ops/lstm/cuda/w_in_smem/kernel.h"

#include "core/index.h"
#include "cuda/gates.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/flag.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "ops/lstm/cuda/w_in_smem/lists.cuh"

namespace blocksparse::lstm {
namespace {

// ---- Config ---------------------------------------------------------------------------------------------------------

constexpr int kTileBytes = 512;  // bytes: 8 outputs x 32 inputs of one gate
static_assert(kChunkBytes == kParts * kGates * kTileBytes);

template <class E, int Tokens, int Warps>
struct Config {
  using Element = E;
  static constexpr int tokens = Tokens, tiles = Tokens / 16;
  static constexpr int most_warps = Warps;  // of an SM, which decides the registers of a thread
  // How many units of x a warp has under way.
  static constexpr int ahead = Warps == 8 ? (Tokens == 16 ? 16 : 6) : (Tokens == 16 ? 6 : 2);
  static_assert(ahead % 2 == 0);
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// One warp of the grid, with the values that it keeps over all steps.
template <class K>
struct Worker {
  using T = typename K::Element;
  const WInSmemArgs& p;
  const int strip, part, group;
  const int barrier;  // of the warps that share a strip and its sequences; barrier + 1 is theirs too
  const Lists lists;
  bool agree = false;
  int resident = 0;         // so many chunks of the strip are in shared memory
  uint32_t weights = 0;     // where this lane's part of these begins in shared memory
  int chunk_of_lane = 0;    // of unit lane() of the first list
  int length[K::tiles][2];  // of this lane's tokens, 0 beyond n
  float c[K::tiles][4];

  __device__ Worker(const WInSmemArgs& p, int strip, int part, int group, int barrier)
      : p(p), strip(strip), part(part), group(group), barrier(barrier), lists(p, max(strip, 0)) {}

  __device__ int token(int tile, int half) const { return group * K::tokens + 16 * tile + 8 * half + lane() / 4; }
  __device__ int unit() const { return strip * kStripUnits + 8 * part + lane() % 4 * 2; }

  __device__ void start() {
    if (lane() < lists.of[0].count) chunk_of_lane = lists.chunk(0, lane());
#pragma unroll
    for (int tile = 0; tile < K::tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = token(tile, half);
        length[tile][half] = n >= p.n ? 0 : p.steps;
        if (n < p.n && p.lengths != nullptr) {
          length[tile][half] = static_cast<int>(max(int64_t{0}, min(p.lengths[n], int64_t{p.steps})));
        }
        float2 cell = {0, 0};
        if (n < p.n && p.c0 != nullptr) {
          cell = *reinterpret_cast<const float2*>(static_cast<const float*>(p.c0) + int64_t{n} * p.hidden + unit());
        }
        c[tile][2 * half] = cell.x, c[tile][2 * half + 1] = cell.y;
      }
    }
  }

  __device__ const uint32_t* arrivals(int chunk) const { return p.arrivals + (chunk * p.groups + group) * kFlagWords; }
  // Waits until the strips of a list have stored h of so many steps. Only one warp looks, because looking empties L1,
  // where the others find what one has read.
  __device__ void wait(int gate, uint32_t steps) const {
    for (int i = lane(); part == 0 && i < lists.of[gate].count; i += 32) {
      const uint32_t* of = arrivals(gate == 0 && i < 32 ? chunk_of_lane : lists.chunk(gate, i));
      while (ptx::ld_acquire(of) < steps) {
      }
    }
    ptx::bar_sync(barrier, 32 * kParts);
  }
  // Announces that h of one more step is stored.
  __device__ void arrive() const {
    if (part != 0) return ptx::bar_arrive(barrier + 1, 32 * kParts);
    ptx::bar_sync(barrier + 1, 32 * kParts);
    if (lane() == 0) ptx::red_release_increment(p.arrivals + (strip * p.groups + group) * kFlagWords);
  }

  __device__ void load_x(uint32_t (&x)[2 * K::tiles][4], const T* h, int chunk) const {
#pragma unroll
    for (int j = 0; j < 2 * K::tiles; ++j) {
      const int row = min(token(j / 2, j % 2), p.n - 1);
      ptx::ld_16(x[j], h + int64_t{row} * p.hidden + chunk * kStripUnits + lane() % 4 * 8);
    }
  }

  __device__ void add_gate(const uint32_t (&w)[4], const uint32_t (&x)[2 * K::tiles][4], float (&sum)[K::tiles][4]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int tile = 0; tile < K::tiles; ++tile) {
        const uint32_t a[4] = {x[2 * tile][2 * s], x[2 * tile + 1][2 * s], x[2 * tile][2 * s + 1],
                               x[2 * tile + 1][2 * s + 1]};
        const uint32_t b[2] = {w[2 * s], w[2 * s + 1]};
        ptx::mma_m16n8k16(sum[tile], a, b, T{});
      }
    }
  }

  __device__ void load_w(uint32_t (&w)[4], int gate, int unit) const {
    ptx::ld_16(w, static_cast<const T*>(p.w) + lists.weight(gate, unit, part));
  }

  // Adds unit i of all gates, from shared memory. A unit beyond the end counts as zeros.
  __device__ void add_w_in_smem(int i, const uint32_t (&x)[2 * K::tiles][4], float (&sums)[kGates][K::tiles][4]) {
    uint32_t w[kGates][4] = {};
    if (i < resident) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const int4 v = ptx::ld_shared_16(weights + static_cast<uint32_t>(i * kChunkBytes + gate * kTileBytes));
        w[gate][0] = v.x, w[gate][1] = v.y, w[gate][2] = v.z, w[gate][3] = v.w;
      }
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) add_gate(w[gate], x, sums[gate]);
  }

  __device__ void load_resident_x(uint32_t (&x)[2 * K::tiles][4], const T* h, int i) const {
    const int chunk = __shfl_sync(~0u, chunk_of_lane, i % 32);
    if (i < resident) return load_x(x, h, chunk);
#pragma unroll
    for (auto& row : x) row[0] = row[1] = row[2] = row[3] = 0;
  }

  // Multiplies all gates, whose lists agree. Units go in twos, so that a list's end costs one branch.
  __device__ void multiply(const T* h, float (&sums)[kGates][K::tiles][4]) {
    uint32_t x[K::ahead][2 * K::tiles][4];
#pragma unroll
    for (int d = 0; d < K::ahead; ++d) load_resident_x(x[d], h, d);
#pragma unroll 1
    for (int i = 0; i < resident; i += K::ahead) {
#pragma unroll
      for (int d = 0; d < K::ahead; d += 2) {
        if (i + d >= resident) break;
        add_w_in_smem(i + d, x[d], sums);
        add_w_in_smem(i + d + 1, x[d + 1], sums);
        if (i + d + K::ahead >= resident) continue;
        load_resident_x(x[d], h, i + d + K::ahead);
        load_resident_x(x[d + 1], h, i + d + 1 + K::ahead);
      }
    }
#pragma unroll 1
    for (int i = resident; i < lists.of[0].count; ++i) {
      load_x(x[0], h, lists.chunk(0, i));
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        uint32_t w[4];
        load_w(w, gate, i);
        add_gate(w, x[0], sums[gate]);
      }
    }
  }

  // Multiplies one gate after the other, each by its own list.
  __device__ void multiply_each(const T* h, uint32_t steps, float (&sums)[kGates][K::tiles][4]) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      wait(gate, steps);
#pragma unroll 1
      for (int i = 0; i < lists.of[gate].count; ++i) {
        uint32_t w[4], x[2 * K::tiles][4];
        load_w(w, gate, i);
        load_x(x, h, lists.chunk(gate, i));
        add_gate(w, x, sums[gate]);
      }
    }
  }

  // Two neighbouring units of [.., 4, H] or [.., H]. `row` counts all dimensions in front of H.
  template <class V>
  __device__ V* pair(void* data, int64_t row) const {
    return reinterpret_cast<V*>(static_cast<T*>(data) + row * p.hidden + unit());
  }

  __device__ void load_pre(int64_t t, uint32_t (&pre)[kGates][K::tiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < K::tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = t * p.n + min(token(tile, half), p.n - 1);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          pre[gate][tile][half] = *pair<const uint32_t>(const_cast<void*>(p.pre), row * kGates + gate);
        }
      }
    }
  }

  __device__ static float element(uint32_t pair, int i) { return widen(T{static_cast<uint16_t>(pair >> (16 * i))}); }

  // Turns the sums into gates, and stores h.
  __device__ void cell(int64_t t, const uint32_t (&pre)[kGates][K::tiles][2], float (&sums)[kGates][K::tiles][4],
                       uint32_t (&h)[K::tiles][2]) {
#pragma unroll
    for (int tile = 0; tile < K::tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool runs = t < length[tile][half];
        float made[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * half + e;
          float z[kGates], state = c[tile][i];
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            z[gate] = sums[gate][tile][i] + element(pre[gate][tile][half], e);
          }
          made[e] = forward_unit<T>(z, state);
          c[tile][i] = runs ? state : 0;  // a sequence that has ended needs it no more
          made[e] = runs ? made[e] : 0;
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) sums[gate][tile][i] = runs ? z[gate] : 0;
        }
        h[tile][half] = narrow_pair(made[0], made[1], T{});
        const int n = token(tile, half);
        if (n < p.n) *pair<uint32_t>(p.y, t * p.n + n) = h[tile][half];
      }
    }
  }

  // Stores the results for which nobody waits.
  __device__ void keep(int64_t t, const float (&gates)[kGates][K::tiles][4], const uint32_t (&h)[K::tiles][2]) {
#pragma unroll
    for (int tile = 0; tile < K::tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = token(tile, half), i = 2 * half;
        if (n >= p.n) continue;
        const float2 state = {c[tile][i], c[tile][i + 1]};
        if (p.gates != nullptr) {
          const int64_t row = t * p.n + n;
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            const float(&of)[4] = gates[gate][tile];
            *pair<uint32_t>(p.gates, row * kGates + gate) = narrow_pair(of[i], of[i + 1], T{});
          }
          *reinterpret_cast<float2*>(static_cast<float*>(p.cells) + row * p.hidden + unit()) = state;
        }
        if (t != length[tile][half] - 1) continue;
        if (p.h_end != nullptr) *pair<uint32_t>(p.h_end, n) = h[tile][half];
        if (p.c_end != nullptr) {
          *reinterpret_cast<float2*>(static_cast<float*>(p.c_end) + int64_t{n} * p.hidden + unit()) = state;
        }
      }
    }
  }

  __device__ void run() {
    const int64_t matrix = int64_t{p.n} * p.hidden;
#pragma unroll 1
    for (int t = 0; t < p.steps; ++t) {
      uint32_t pre[kGates][K::tiles][2], h[K::tiles][2];
      float sums[kGates][K::tiles][4] = {};
      load_pre(t, pre);
      const T* before = static_cast<const T*>(t == 0 ? p.h0 : p.y) + (t == 0 ? 0 : (t - 1) * matrix);
      if (t > 0 || p.h0 != nullptr) {
        if (agree) {
          wait(0, static_cast<uint32_t>(t));
          multiply(before, sums);
        } else {
          multiply_each(before, static_cast<uint32_t>(t), sums);
        }
      }
      cell(t, pre, sums, h);
      arrive();
      keep(t, sums, h);
    }
  }
};

template <class K>
__global__ void __launch_bounds__(32 * K::most_warps, 1) forward_w_in_smem(const __grid_constant__ WInSmemArgs p) {
  extern __shared__ uint4 shared[];
  __shared__ int32_t owned[kMostStrips], chunks[kMostStrips];
  deal_strips(p, reinterpret_cast<int32_t*>(shared), owned);
  const int warp = static_cast<int>(threadIdx.x) / 32, own = warp / (kParts * p.groups);
  Worker<K> worker(p, owned[own], warp % kParts, warp / kParts % p.groups, 1 + warp / kParts * 2);
  worker.agree = worker.strip >= 0 && worker.lists.agree();
  if (warp % (kParts * p.groups) == 0) chunks[own] = worker.agree ? worker.lists.of[0].count : 0;
  __syncthreads();
  int before = 0;
  for (int s = 0; s < own; ++s) before += chunks[s];
  worker.resident = max(0, min(chunks[own], kMostChunks - before));
  worker.weights = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
                   static_cast<uint32_t>(before * kChunkBytes + worker.part * kGates * kTileBytes + lane() * 16);
  for (int i = worker.group; i < worker.resident; i += p.groups) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      auto* to =
          reinterpret_cast<char*>(shared) + (before + i) * kChunkBytes + (worker.part * kGates + gate) * kTileBytes;
      const auto* from = static_cast<const typename K::Element*>(p.w) + worker.lists.weight(gate, i, worker.part);
      ptx::cp_async_16(to + lane() * 16, from, 16);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (worker.strip < 0) return;
  worker.start();
  worker.run();
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T, class Body>
Status with_w_in_smem_kernel(int32_t tokens, int32_t warps, Body body) {
  if (warps <= 8) {
    return tokens == 16 ? body(forward_w_in_smem<Config<T, 16, 8>>) : body(forward_w_in_smem<Config<T, 32, 8>>);
  }
  return tokens == 16 ? body(forward_w_in_smem<Config<T, 16, 16>>) : body(forward_w_in_smem<Config<T, 32, 16>>);
}

template <class Body>
Status with_w_in_smem_kernel(DType dtype, int32_t tokens, int32_t warps, Body body) {
  return dtype == DType::bf16 ? with_w_in_smem_kernel<Bf16>(tokens, warps, body)
                              : with_w_in_smem_kernel<F16>(tokens, warps, body);
}

}  // namespace

bool w_in_smem_takes(const Forward& f) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return aligned(f.pre) && aligned(f.w) && aligned(f.h0) && aligned(f.c0) && aligned(f.y) && aligned(f.gates) &&
         aligned(f.cells) && aligned(f.h) && aligned(f.c);
}

Status launch_w_in_smem(const Forward& f, const WInSmemPlan& plan, void* memory, void* stream) {
  const int64_t b = f.layout.block_size;
  const IndexSections at = index_sections(f.layout.out_features / b, f.layout.in_features / b, f.layout.blocks);
  const WInSmemArgs args{.starts = f.layout.index + at.by_out.starts,
                         .refs = reinterpret_cast<const BlockRef*>(f.layout.index + at.by_out.refs),
                         .pre = f.pre,
                         .w = f.w,
                         .h0 = f.h0,
                         .c0 = f.c0,
                         .y = f.y,
                         .gates = f.gates,
                         .cells = f.cells,
                         .h_end = f.h,
                         .c_end = f.c,
                         .lengths = f.lengths,
                         .arrivals = static_cast<uint32_t*>(memory),
                         .steps = static_cast<int32_t>(f.steps),
                         .n = static_cast<int32_t>(f.n),
                         .hidden = static_cast<int32_t>(f.hidden),
                         .strips = static_cast<int32_t>(f.hidden / kStripUnits),
                         .groups = plan.groups,
                         .block = f.layout.block_size,
                         .shift = f.layout.block_size / kStripUnits / 2};
  const auto queue = static_cast<cudaStream_t>(stream);
  BS_RETURN_IF_ERROR(
      cuda::status_of(cudaMemsetAsync(memory, 0, w_in_smem_workspace_bytes(f.layout), queue), "cudaMemsetAsync"));
  return with_w_in_smem_kernel(f.dtype, plan.tokens, plan.warps(), [&](auto kernel) {
    return cuda::launch({.blocks = plan.grid,
                         .threads = 32 * plan.warps(),
                         .shared_bytes = kMostChunks * kChunkBytes,
                         .stream = queue,
                         .cooperative = true},
                        kernel, args);
  });
}

Status prepare_w_in_smem() {
  for (DType dtype : {DType::bf16, DType::f16}) {
    for (int32_t tokens : {16, 32}) {
      for (int32_t warps : {8, 16}) {
        BS_RETURN_IF_ERROR(with_w_in_smem_kernel(
            dtype, tokens, warps, [](auto kernel) { return cuda::prepare(kernel, kMostChunks * kChunkBytes); }));
      }
    }
  }
  return {};
}

}  // namespace blocksparse::lstm
