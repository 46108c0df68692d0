#include <algorithm>

#include "cuda/divider.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "ops/conv/cuda_taps.h"
#include "ops/conv/select_cuda.h"

namespace blocksparse::conv {
namespace {

constexpr int kTapThreads = 256;

struct TapTask {
  TapList list;
  cuda::Divider taps;
  int32_t* starts;
  BlockRef* refs;
  float* gates;
};

__global__ void __launch_bounds__(kTapThreads) spread_taps(const __grid_constant__ TapTask t) {
  // All in front is complete before anything behind begins: see cuda_few_pack.cu.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const TapList& l = t.list;
  const auto first = static_cast<int>(blockIdx.x * kTapThreads + threadIdx.x);
  const auto step = static_cast<int>(gridDim.x * kTapThreads);
  for (int row = first; row <= l.rows; row += step) t.starts[row] = l.from.starts[row] * l.taps;
  const auto count = static_cast<int>(l.blocks * l.taps);
  for (int i = first; i < count; i += step) {
    int tap = i;
    const int block = t.taps.divide(tap);
    const BlockRef ref = l.from.refs[block];
    const int place = l.mirrored ? l.taps - 1 - tap : tap;
    const int weight = ref.weight * l.taps + tap;
    t.refs[i] = {place * l.columns_of_tap + ref.from, weight};
    if (l.gates != nullptr) t.gates[weight] = l.gates[ref.weight];
  }
}

}  // namespace

Result<TapWalk> list_taps(const TapList& list, void* workspace, cudaStream_t stream) {
  const TapPlaces at = tap_places(list.rows, list.blocks, list.taps);
  auto* base = static_cast<char*>(workspace);
  const TapTask task{.list = list,
                     .taps = cuda::Divider(list.taps),
                     .starts = reinterpret_cast<int32_t*>(base + at.starts),
                     .refs = reinterpret_cast<BlockRef*>(base + at.refs),
                     .gates = reinterpret_cast<float*>(base + at.gates)};
  const int64_t work = std::max(list.blocks * list.taps, list.rows + 1);
  BS_RETURN_IF_ERROR(cuda::launch({.blocks = std::clamp<int64_t>((work + kTapThreads - 1) / kTapThreads, 1, 1024),
                                   .threads = kTapThreads,
                                   .stream = stream,
                                   .overlap = true},
                                  spread_taps, task));
  return TapWalk{{.counts = nullptr, .starts = task.starts, .refs = task.refs, .pieces = nullptr, .splits = nullptr},
                 list.gates == nullptr ? nullptr : task.gates};
}

Status prepare_taps() { return cuda::prepare(spread_taps, 0); }

}  // namespace blocksparse::conv
