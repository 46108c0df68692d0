#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/conv/cuda/gather/taps.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {
namespace {

constexpr int kTapThreads = 256;

struct TapTask {
  TapList list;
  int32_t count;  // how many taps
  cuda::Divider taps, of_slice, of_row;
  int32_t* starts;
  BlockRef* refs;
  float* gates;

  // The number of a listed tap among all taps of the filter.
  __device__ int tap(int index) const {
    const TapSubset& t = list.taps;
    const int slice = of_slice.divide(index), row = of_row.divide(index);
    const int at[3] = {t.start[0] + slice * t.step[0], t.start[1] + row * t.step[1], t.start[2] + index * t.step[2]};
    return (at[0] * list.kernel[1] + at[1]) * list.kernel[2] + at[2];
  }
};

__global__ void __launch_bounds__(kTapThreads) spread_taps(const __grid_constant__ TapTask t) {
  // The kernel in front is complete before the kernel behind begins: see gemm/cuda/stream_w/pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const TapList& l = t.list;
  const auto first = static_cast<int>(blockIdx.x * kTapThreads + threadIdx.x);
  const auto step = static_cast<int>(gridDim.x * kTapThreads);
  for (int row = first; row <= l.rows; row += step) t.starts[row] = l.from.starts[row] * t.count;
  const auto count = static_cast<int>(l.blocks * t.count);
  const int all = l.kernel[0] * l.kernel[1] * l.kernel[2];
  for (int i = first; i < count; i += step) {
    int index = i;
    const int block = t.taps.divide(index);
    const BlockRef ref = l.from.refs[block];
    const int place = l.taps.mirrored ? t.count - 1 - index : index, weight = ref.weight * all + t.tap(index);
    t.refs[i] = {place * l.columns_of_tap + ref.from, weight};
    if (l.gates != nullptr) t.gates[weight] = l.gates[ref.weight];
  }
}

}  // namespace

Result<TapWalk> list_taps(const TapList& list, void* workspace, cudaStream_t stream) {
  const int64_t count = list.taps.taps(), all = int64_t{list.kernel[0]} * list.kernel[1] * list.kernel[2];
  const TapPlaces at = tap_places(list.rows, list.blocks, all);
  auto* base = static_cast<char*>(workspace);
  const TapTask task{.list = list,
                     .count = static_cast<int32_t>(count),
                     .taps = cuda::Divider(std::max<int64_t>(1, count)),
                     .of_slice = cuda::Divider(std::max(1, list.taps.count[1] * list.taps.count[2])),
                     .of_row = cuda::Divider(std::max(1, list.taps.count[2])),
                     .starts = reinterpret_cast<int32_t*>(base + at.starts),
                     .refs = reinterpret_cast<BlockRef*>(base + at.refs),
                     .gates = reinterpret_cast<float*>(base + at.gates)};
  const int64_t work = std::max(list.blocks * count, list.rows + 1);
  BS_RETURN_IF_ERROR(cuda::launch({.blocks = std::clamp<int64_t>(ceil_div(work, kTapThreads), 1, 1024),
                                   .threads = kTapThreads,
                                   .stream = stream,
                                   .overlap = true},
                                  spread_taps, task));
  return TapWalk{{.counts = nullptr,
                  .starts = task.starts,
                  .refs = task.refs,
                  .pieces = nullptr,
                  .splits = nullptr,
                  .order = list.from.order},
                 list.gates == nullptr ? nullptr : task.gates};
}

Status prepare_taps() { return cuda::prepare(spread_taps, 0); }

}  // namespace blocksparse::conv
