#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/movmatrix.h"
#include "ops/linear/cuda_many_walk.h"

namespace blocksparse::linear {
namespace {

constexpr int kPackThreads = 256;
constexpr int kAtOnce = 8;  // matrices that a warp has under way

struct ManyPack {
  const ManySource* sources;
  const uint16_t* w;
  char* to;
  int64_t cells;
  int64_t inputs;
  bool by_in;
};

// Cells are core matrices of 8 outputs x 8 inputs, one behind the other. A lane has row lane / 4, elements 2 (lane % 4)
// and the next, which movmatrix turns.
template <ManyKind Kind, int B>
__global__ void __launch_bounds__(kPackThreads) many_pack(const __grid_constant__ ManyPack p) {
  constexpr ManyForm form = form_of(Kind);
  constexpr int kRows = form.slot_outputs / 8, kMatrices = kRows * form.cell_inputs / 8;
  constexpr int kColumns = form.cell_inputs / B, kIds = form.slot_outputs / B * kColumns;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, pair = lane % 4 * 2;
  const int64_t first = (int64_t{blockIdx.x} * kPackThreads + threadIdx.x) / 32 * kAtOnce;
  ManySource sources[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t cell = (first + i) / kMatrices;
    const int matrix = static_cast<int>((first + i) % kMatrices), out = matrix % kRows * 8, in = matrix / kRows * 8;
    sources[i] = {kNoCell, 0};
    if (cell < p.cells) sources[i] = p.sources[cell * kIds + out / B * kColumns + in / B];
  }
  uint32_t words[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int matrix = static_cast<int>((first + i) % kMatrices), out = matrix % kRows * 8 % B,
              in = matrix / kRows * 8 % B;
    const int at = p.by_in ? (in + row) * B + out + pair : (out + row) * B + in + pair;
    words[i] = 0;
    if (sources[i].weight < 0) continue;
    words[i] = *reinterpret_cast<const uint32_t*>(p.w + int64_t{sources[i].weight} * (B * B) + at);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int in = static_cast<int>((first + i) % kMatrices) / kRows * 8 % B;
    uint32_t word = p.by_in ? ptx::movmatrix_trans(words[i]) : words[i];
    const int64_t inside = p.inputs - int64_t{sources[i].from} * B - in - pair;
    if (inside < 2) word = inside < 1 ? 0 : word & 0xffff;  // W may hold anything beyond the edge
    if (sources[i].weight == kNoCell) continue;
    *reinterpret_cast<uint32_t*>(p.to + (first + i) * 128 + lane * 4) = word;
  }
}

// body(kernel) with the kernel for that kind and block size.
template <class Body>
Status with_pack_kernel(ManyKind kind, int32_t block, Body body) {
  switch (kind) {
    case ManyKind::direct: return {};
    case ManyKind::filled: return body(many_pack<ManyKind::filled, 8>);
    case ManyKind::cells32: return body(many_pack<ManyKind::cells32, 32>);
    case ManyKind::cells16: break;
  }
  return block == 8 ? body(many_pack<ManyKind::cells16, 8>) : body(many_pack<ManyKind::cells16, 16>);
}

}  // namespace

Status pack_many_cells(const ManyPlan& plan, const CudaCall& call, const void* w, const ManyTables& to) {
  const CudaProblem& p = call.problem;
  const ManyPack args{.sources = to.sources,
                      .w = static_cast<const uint16_t*>(w),
                      .to = to.cells,
                      .cells = plan.cells,
                      .inputs = p.inputs,
                      .by_in = p.by_in};
  return with_pack_kernel(plan.kind, p.block, [&](auto kernel) {
    constexpr int64_t kBytes = int64_t{128} * kAtOnce * kPackThreads / 32;  // of a thread block
    return cuda::launch(
        {.blocks = std::max<int64_t>(1, (plan.cells * form_of(plan.kind).cell_bytes() + kBytes - 1) / kBytes),
         .threads = kPackThreads,
         .stream = static_cast<cudaStream_t>(call.stream),
         .overlap = true},
        kernel, args);
  });
}

Status prepare_many_pack() {
  for (auto kind : {ManyKind::filled, ManyKind::cells32, ManyKind::cells16}) {
    for (int32_t block : {8, 16}) {
      BS_RETURN_IF_ERROR(with_pack_kernel(kind, block, [](auto kernel) { return cuda::prepare(kernel, 0); }));
    }
  }
  return {};
}

}  // namespace blocksparse::linear
