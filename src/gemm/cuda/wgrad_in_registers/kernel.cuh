// dW[i] = gate_i dy_out^T x_in for many tokens and small blocks: a thread block holds all blocks of a region of dW in
// registers, and walks the tokens once.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32
// Who does what
//   tables    a kernel in front cuts strips of outputs into jobs of about as many blocks each: jobs.cu
//   grid      one thread block an SM; an item is a job and a slice of the tokens
//   load      a stage is 32 tokens of the job's x and dy. On sm_90a a producer warp loads boxes; on other cards all
//             threads use cp.async, and copies and products wait for each other
//   compute   each warp has some of the blocks in the order of rows, so that it reads dy of a row once: mma.sync
//             b = 16, 32: its rows are outputs, its columns inputs. b = 8: its rows are the inputs of two blocks
//   finish    registers to dW; slices go to the workspace, and a last kernel adds them and computes gates' gradients
// wgmma would need patches of 64 outputs or inputs, and a random pattern leaves most of such a patch empty. Here no
// product is wasted. Shared memory is the limit: a block of 16 x 16 and 16 tokens takes 4 to 5 reads of 128 bytes,
// where the tensor cores take 3.
#pragma once

#include "core/ceil_div.h"
#include "cuda/current_card.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ring.h"
#include "cuda/tile.h"
#include "gemm/cuda/wgrad_in_registers/tile.cuh"

namespace blocksparse::gemm::wgrad_in_registers {
namespace {

// The items of a thread block, in turn.
class Work {
 public:
  // All threads of the thread block construct it: it synchronises.
  __device__ Work(const Args& g, int32_t* counts, int32_t* before) : g_(g), before_(before) {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < g.strips) counts[thread] = g.tables.counts[thread];
    __syncthreads();
    if (thread <= g.strips) {
      int sum = 0;
      for (int s = 0; s < thread; ++s) sum += counts[s];
      before[thread] = sum;
    }
    __syncthreads();
    jobs_ = before[g.strips];
    next_ = static_cast<int>(blockIdx.x);
  }

  __device__ bool next(Item& item) {
    if (next_ >= jobs_ * g_.slices) return false;
    const int job = next_ % jobs_;
    item.slice = next_ / jobs_;
    item.strip = 0;
    while (job >= before_[item.strip + 1]) ++item.strip;
    item.job = g_.tables.jobs[item.strip * kMostStripJobs + job - before_[item.strip]];
    item.first_step = static_cast<int32_t>(int64_t{g_.steps} * item.slice / g_.slices);
    item.last_step = static_cast<int32_t>(int64_t{g_.steps} * (item.slice + 1) / g_.slices);
    next_ += static_cast<int>(gridDim.x);
    return true;
  }

 private:
  const Args& g_;
  const int32_t* before_;
  int jobs_, next_;
};

struct Shared {
  int32_t counts[kMostStrips], before[kMostStrips + 1];
  cuda::Ring<kMostStages> ring;
};

template <class K>
__global__ void __launch_bounds__(K::threads, 1) wgrad_in_registers_sums(const __grid_constant__ Args g) {
  extern __shared__ __align__(1024) char stages[];
  __shared__ Shared shared;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const uint32_t begin = ptx::shared_address(stages);
  const auto at = [&](int stage) { return begin + static_cast<uint32_t>(stage * g.boxes * kBoxBytes); };
  Item item{};
  for (Work work(g, shared.counts, shared.before); work.next(item);) {
    for (int first = 0; first < patches_of_job<K>(g, item.job); first += K::patches_of_pass) {
      const Patches<K> patches(g, item, first);
      float sum[K::patches][K::sums] = {};
      cuda::pipeline<kLeastStages>(
          item.last_step - item.first_step, [&](int64_t step, int stage) { load_rows<K>(g, item, step, at(stage)); },
          [&](int stage) { multiply_patches<K>(g, patches, at(stage), sum); });
      store_patch<K>(g, item, patches, sum);
    }
  }
}

// The form for sm_90a: one warp loads boxes, the others compute.
template <class K>
__global__ void __launch_bounds__(K::threads + 128, 1)
    wgrad_in_registers_boxes([[maybe_unused]] const __grid_constant__ Maps maps,
                             [[maybe_unused]] const __grid_constant__ Args g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char stages[];
  __shared__ Shared shared;
  const uint32_t begin = ptx::shared_address(stages);
  if (threadIdx.x == 0) {
    shared.ring.init(g.stages, K::warps);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  Work work(g, shared.counts, shared.before);
  Item item{};
  cuda::RingPlace place;
  if (threadIdx.x >= K::threads) {
    ptx::setmaxnreg_dec<K::load_registers>();
    if (threadIdx.x >= K::threads + 32) return;
    while (work.next(item)) {
      const Boxes of(g, item);
      for (int first = 0; first < patches_of_job<K>(g, item.job); first += K::patches_of_pass) {
        for (int step = item.first_step; step < item.last_step; ++step) {
          shared.ring.wait_empty(place);
          load_boxes(g, maps, of, step * kTokens, place.in(begin, g.boxes * kBoxBytes), shared.ring.full(place));
          place.advance(g.stages);
        }
      }
    }
    return;
  }
  ptx::setmaxnreg_inc<K::registers>();
  while (work.next(item)) {
    for (int first = 0; first < patches_of_job<K>(g, item.job); first += K::patches_of_pass) {
      const Patches<K> patches(g, item, first);
      float sum[K::patches][K::sums] = {};
      for (int step = item.first_step; step < item.last_step; ++step) {
        shared.ring.wait_full(place);
        multiply_patches<K>(g, patches, place.in(begin, g.boxes * kBoxBytes), sum);
        shared.ring.release_warp(place);
        place.advance(g.stages);
      }
      store_patch<K>(g, item, patches, sum);
    }
  }
#endif
}

// Neighbouring sums (float2 or float4), added over the slices in their order.
template <class Vector>
__device__ inline Vector sum_of_slices(const Args& g, int64_t at) {
  Vector of[kMostSlices];
#pragma unroll
  for (int s = 0; s < kMostSlices; ++s) {
    if (s < g.slices) of[s] = *reinterpret_cast<const Vector*>(g.partial + s * g.values + at);
  }
  Vector sum = of[0];
#pragma unroll
  for (int s = 1; s < kMostSlices; ++s) {
    if (s >= g.slices) continue;
    sum.x += of[s].x, sum.y += of[s].y;
    if constexpr (sizeof(Vector) == 16) sum.z += of[s].z, sum.w += of[s].w;
  }
  return sum;
}

// How many of the two elements at `e` and `e + 1` of block `id` lie in the matrix.
__device__ inline int inside_of_block(const Args& g, int32_t id, int e) {
  const int64_t output = (int64_t{g.out_of[id]} << g.block_shift) + (e >> g.block_shift);
  const int64_t left = g.inputs - (int64_t{g.refs[id].from} << g.block_shift) - (e & (g.block - 1));
  return output < g.outputs ? static_cast<int>(min(max(left, int64_t{0}), int64_t{2})) : 0;
}

// Without gates' gradients a thread has four sums. A warp a block, as below, took 25 us for 1638 blocks of 32.
template <class T>
__device__ inline void combine_sums(const Args& g) {
  const int area_shift = 2 * g.block_shift;
  const bool whole = ((g.inputs | g.outputs) & (g.block - 1)) == 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * 4;
  for (int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4; at < g.values; at += step) {
    const auto id = static_cast<int32_t>(at >> area_shift);
    const int e = static_cast<int>(at) & ((1 << area_shift) - 1);
    const auto sum = sum_of_slices<float4>(g, at);
    g.target.store_pair<T>(id, at, whole ? 2 : inside_of_block(g, id, e), {sum.x, sum.y});
    g.target.store_pair<T>(id, at + 2, whole ? 2 : inside_of_block(g, id, e + 2), {sum.z, sum.w});
  }
}

// With gates' gradients a warp has a block, whose <S, W> it adds up.
template <class T>
__device__ inline void combine_blocks(const Args& g) {
  const int lane = static_cast<int>(threadIdx.x) % 32, area = g.block * g.block;
  const auto warps = static_cast<int32_t>(gridDim.x * blockDim.x / 32);
  for (auto id = static_cast<int32_t>((blockIdx.x * blockDim.x + threadIdx.x) / 32); id < g.blocks; id += warps) {
    float product = 0;
    for (int e = 2 * lane; e < area; e += 64) {
      const int64_t at = int64_t{id} * area + e;
      const auto sum = sum_of_slices<float2>(g, at);
      const int inside = inside_of_block(g, id, e);
      g.target.store_pair<T>(id, at, inside, sum);
      product += gate_product<T>(g.w, at, inside, sum);
    }
    product = sum_of_warp(product);
    if (lane == 0) g.dgates[id] = (g.target.accumulate ? g.dgates[id] : 0) + product;
  }
}

template <class T>
__global__ void __launch_bounds__(256) wgrad_in_registers_combine(const __grid_constant__ Args g) {
  ptx::griddepcontrol_wait();
  if (g.dgates == nullptr) combine_sums<T>(g);
  else combine_blocks<T>(g);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int32_t block, Body body) {
  switch (block) {
    case 8: return body.template operator()<Kernel<T, 8>>();
    case 16: return body.template operator()<Kernel<T, 16>>();
    default: return body.template operator()<Kernel<T, 32>>();
  }
}

inline Status map_of(const Activations& a, CUtensorMap& map) {
  return cuda::make_tensor_map({.data = a.data,
                                .columns = a.features,
                                .rows = a.n,
                                .row_stride = a.token_stride,
                                .box_columns = 64,
                                .box_rows = kTokens},
                               map);
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  const CudaProblem& p = call.problem;
  const GradTerm term = g.term(0);
  const Plan plan = plan_of(p, call.card);
  const Tables tables = tables_in(p, call.workspace.data);
  const auto walk = walk_on_device(g.layout, false);
  const bool partial = plan.slices > 1 || g.dgates != nullptr, overlap = call.card.sm90a;
  const Args args{.tables = tables,
                  .target = target_of(g),
                  .x = term.x.data,
                  .dy = term.dy.data,
                  .x_stride = term.x.token_stride,
                  .dy_stride = term.dy.token_stride,
                  .n = term.x.n,
                  .inputs = p.inputs,
                  .outputs = p.outputs,
                  .block = p.block,
                  .block_shift = __builtin_ctz(static_cast<unsigned>(p.block)),
                  .wide_shift = p.block > 32 ? __builtin_ctz(static_cast<unsigned>(p.block)) - 5 : 0,
                  .strips = plan.strips,
                  .strip_rows = plan.strip_rows,
                  .slices = plan.slices,
                  .steps = static_cast<int32_t>(ceil_div(p.n, kTokens)),
                  .stages = plan.stages,
                  .dy_boxes = dy_boxes_of(plan.strip_rows, p.block),
                  .boxes = plan.boxes,
                  .partial = partial ? tables.partial : nullptr,
                  .values = p.blocks * p.block * p.block,
                  .refs = walk.refs,
                  .out_of = out_of_on_device(g.layout),
                  .w = g.w,
                  .dgates = static_cast<float*>(g.dgates),
                  .blocks = static_cast<int32_t>(p.blocks)};
  Maps maps{};
  if (call.card.sm90a) {
    BS_RETURN_IF_ERROR(map_of(term.x, maps.x));
    BS_RETURN_IF_ERROR(map_of(term.dy, maps.dy));
  }
  BS_RETURN_IF_ERROR(make_jobs(call, plan, walk, tables));
  BS_RETURN_IF_ERROR(with_kernel<T>(p.block, [&]<class K>() {
    cuda::Launch how{.blocks = call.card.multiprocessors,
                     .threads = K::threads,
                     .shared_bytes = plan.stages * plan.boxes * kBoxBytes,
                     .stream = stream_of(call),
                     .overlap = overlap};
    if (!call.card.sm90a) return cuda::launch(how, wgrad_in_registers_sums<K>, args);
    how.threads += 128;
    return cuda::launch(how, wgrad_in_registers_boxes<K>, maps, args);
  }));
  if (!partial) return {};
  const int64_t tasks = g.dgates != nullptr ? p.blocks / 8 : args.values / 1024;
  return cuda::launch({.blocks = std::clamp<int64_t>(tasks, 1, int64_t{16} * call.card.multiprocessors),
                       .threads = 256,
                       .stream = stream_of(call),
                       .overlap = overlap},
                      wgrad_in_registers_combine<T>, args);
}

template <class T>
Status prepare() {
  const auto card = cuda::current_card();
  if (!card.ok()) return card.status();
  const bool boxes = card->arch >= 90;
  const int bytes = card->shared_bytes - 2048;  // the rest is for static shared memory
  for (int32_t block : {8, 16, 32}) {
    BS_RETURN_IF_ERROR(with_kernel<T>(block, [&]<class K>() {
      if (boxes) BS_RETURN_IF_ERROR(cuda::prepare(wgrad_in_registers_boxes<K>, bytes));
      return cuda::prepare(wgrad_in_registers_sums<K>, bytes);
    }));
  }
  BS_RETURN_IF_ERROR(cuda::prepare(wgrad_in_registers_combine<T>, 0));
  if (boxes) BS_RETURN_IF_ERROR(cuda::prepare_tensor_maps());
  return prepare_jobs();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_in_registers
