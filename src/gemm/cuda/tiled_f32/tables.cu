#include "gemm/cuda/tiled_f32/tables.h"

#include "core/ceil_div.h"
#include "cuda/launch.h"

namespace blocksparse::gemm::tiled_f32 {
namespace {

constexpr int kTableThreads = 256, kWarps = kTableThreads / 32;

// Scans `mine` over the thread block: the sum of the threads before, and of all. `shared` has kWarps words and is free
// again after the next barrier.
__device__ inline int2 scan(int mine, int* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    before += i < warp ? shared[i] : 0;
    all += shared[i];
  }
  return {before + sum - mine, all};
}

struct WalkTask {
  const int32_t* starts;
  const BlockRef* refs;
  int32_t rows, inputs;  // counted in blocks
  int32_t *counts, *list, *weights;
};

// A thread block makes the list of one group. It writes all blocks to their places, then removes entries without any.
template <int Rows>
__global__ void __launch_bounds__(kTableThreads) tiled_f32_walk(const WalkTask t) {
  __shared__ int shared[kWarps];
  const int thread = static_cast<int>(threadIdx.x), group = static_cast<int>(blockIdx.x);
  int32_t* weights = t.weights + int64_t{group} * t.inputs * Rows;
  int32_t* list = t.list + int64_t{group} * t.inputs;
  for (int64_t i = thread; i < int64_t{t.inputs} * Rows; i += kTableThreads) weights[i] = 0;
  __syncthreads();
  for (int r = thread / 32; r < Rows; r += kWarps) {
    const int row = group * Rows + r;
    if (row >= t.rows) break;
    for (int i = t.starts[row] + thread % 32; i < t.starts[row + 1]; i += 32) {
      const BlockRef ref = t.refs[i];
      weights[int64_t{ref.from} * Rows + r] = ref.weight + 1;
    }
  }
  __syncthreads();
  int count = 0;
  for (int first = 0; first < t.inputs; first += kTableThreads) {
    const int input = first + thread;
    int32_t mine[Rows];
    bool any = false;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      mine[r] = input < t.inputs ? weights[int64_t{input} * Rows + r] : 0;
      any = any || mine[r] > 0;
    }
    const int2 place = scan(any ? 1 : 0, shared);  // after this all threads have read before any of them writes
    if (any) {
      list[count + place.x] = input;
#pragma unroll
      for (int r = 0; r < Rows; ++r) weights[int64_t{count + place.x} * Rows + r] = mine[r];
    }
    count += place.y;
    __syncthreads();
  }
  if (thread == 0) t.counts[group] = count;
}

struct RunTask {
  const int32_t* starts;
  int32_t rows, most;  // most: blocks of a run
  int32_t* count;
  Run* runs;
};

// Cuts rows into runs of equal lengths. One thread block.
__global__ void __launch_bounds__(kTableThreads) tiled_f32_runs(const RunTask t) {
  __shared__ int shared[kWarps];
  int count = 0;
  for (int first = 0; first < t.rows; first += kTableThreads) {
    const int row = first + static_cast<int>(threadIdx.x);
    const int begin = row < t.rows ? t.starts[row] : 0, length = row < t.rows ? t.starts[row + 1] - begin : 0;
    const int runs = ceil_div(length, t.most);
    const int2 place = scan(runs, shared);
    for (int i = 0; i < runs; ++i) {
      const auto cut = [&](int64_t at) { return begin + static_cast<int32_t>(at * length / runs); };
      t.runs[count + place.x + i] = {row, cut(i), cut(i + 1)};
    }
    count += place.y;
    __syncthreads();
  }
  if (threadIdx.x == 0) *t.count = count;
}

template <class Body>
Status with_rows(int32_t block, Body body) {
  switch (block) {
    case 8: return body(tiled_f32_walk<16>);
    case 16: return body(tiled_f32_walk<8>);
    case 32: return body(tiled_f32_walk<4>);
    case 64: return body(tiled_f32_walk<2>);
    default: return body(tiled_f32_walk<1>);
  }
}

char* bytes_of(void* workspace) { return static_cast<char*>(workspace); }

}  // namespace

Walk walk_in(const CudaProblem& p, void* workspace) {
  const WorkspacePlaces at = workspace_places(p);
  char* base = bytes_of(workspace);
  return {reinterpret_cast<int32_t*>(base + at.counts), reinterpret_cast<int32_t*>(base + at.inputs),
          reinterpret_cast<int32_t*>(base + at.weights)};
}

Status make_walk(const Product& p, const CudaCall& call) {
  const DeviceWalk walk = walk_on_device(p.layout, p.by_in);
  const Walk to = walk_in(call.problem, call.workspace.data);
  const WalkTask task{.starts = walk.starts,
                      .refs = walk.refs,
                      .rows = static_cast<int32_t>(call.problem.output_blocks()),
                      .inputs = static_cast<int32_t>(call.problem.input_blocks()),
                      .counts = const_cast<int32_t*>(to.counts),
                      .list = const_cast<int32_t*>(to.inputs),
                      .weights = const_cast<int32_t*>(to.weights)};
  return with_rows(p.layout.block_size, [&](auto kernel) {
    return cuda::launch(
        {.blocks = groups_of(call.problem), .threads = kTableThreads, .stream = static_cast<cudaStream_t>(call.stream)},
        kernel, task);
  });
}

const int32_t* run_count(void* workspace) { return static_cast<int32_t*>(workspace); }
const Run* run_list(void* workspace) { return reinterpret_cast<Run*>(bytes_of(workspace) + 64); }

Status make_runs(const WeightGradient& g, const CudaCall& call) {
  const RunTask task{.starts = walk_on_device(g.layout, false).starts,
                     .rows = static_cast<int32_t>(call.problem.output_blocks()),
                     .most = run_blocks(g.layout.block_size),
                     .count = static_cast<int32_t*>(call.workspace.data),
                     .runs = const_cast<Run*>(run_list(call.workspace.data))};
  return cuda::launch({.threads = kTableThreads, .stream = static_cast<cudaStream_t>(call.stream)}, tiled_f32_runs,
                      task);
}

Status prepare_tables() {
  for (int32_t block : {8, 16, 32, 64, 128}) {
    BS_RETURN_IF_ERROR(with_rows(block, [](auto kernel) { return cuda::prepare(kernel, 0); }));
  }
  return cuda::prepare(tiled_f32_runs, 0);
}

}  // namespace blocksparse::gemm::tiled_f32
