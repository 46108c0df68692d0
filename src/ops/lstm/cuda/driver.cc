// Runs the steps on a card. Forward is one launch if W fits on the chip. Otherwise, and backward, a step is a product
// of the linear op and a kernel for the cell.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cuda/card.h"
#include "cuda/once.h"
#include "gemm/cuda/forced.h"
#include "gemm/product.h"
#include "ops/lstm/cuda/cell.h"
#include "ops/lstm/cuda/w_in_smem/kernel.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

namespace {

constexpr int64_t kAlignment = 256;

const char* advance(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
char* advance(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * size_of(dtype);
}

// The parts of the workspace, in bytes from its first multiple of kAlignment.
struct Plan {
  int64_t sums = 0;  // result of a step's product: `rows` features of n sequences
  int64_t state, linear, total;

  Plan(DType dtype, int64_t n, int64_t hidden, int64_t rows, size_t linear_bytes) {
    state = round_up(n * rows * size_of(dtype), kAlignment);
    linear = state + round_up(n * hidden * size_of(sum_dtype(dtype)), kAlignment);
    total = linear + static_cast<int64_t>(linear_bytes) + kAlignment;
  }
};

// The memory of a call, on the current card.
struct Memory {
  char* at;
  Workspace linear;

  Memory(Workspace workspace, const Plan& plan)
      : at(reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(workspace.data), kAlignment))),
        linear{at + plan.linear, static_cast<size_t>(plan.total - plan.linear - kAlignment)} {}
};

size_t linear_bytes(gemm::Pass pass, const LayoutView& layout, DType dtype, int64_t n) {
  return gemm::cuda_workspace_size(pass, layout, dtype, n);
}

Plan plan_forward(const LayoutView& layout, DType dtype, int64_t n) {
  return {dtype, n, layout.in_features, layout.out_features, linear_bytes(gemm::Pass::fprop, layout, dtype, n)};
}

Plan plan_backward(const LayoutView& layout, DType dtype, int64_t steps, int64_t n) {
  size_t bytes = linear_bytes(gemm::Pass::dgrad, layout, dtype, n);
  for (const int64_t tokens : {n, (std::max<int64_t>(steps, 1) - 1) * n}) {  // of the first step, and of the others
    bytes = std::max(bytes, linear_bytes(gemm::Pass::wgrad, layout, dtype, tokens));
  }
  return {dtype, n, layout.in_features, layout.in_features, bytes};
}

// Whether kernels of the current device may begin before the kernel in front has ended. The first call loads them.
Result<bool> prepared(Device device) {
  static cuda::KnownPerDevice overlaps;
  return overlaps(device, [&]() -> Result<bool> {
    BS_RETURN_IF_ERROR(prepare_cells());
    const auto card = cuda::card_of(device);
    if (!card.ok()) return card.status();
    if (card->sm90a) BS_RETURN_IF_ERROR(prepare_w_in_smem());  // other cards have too little shared memory
    return cells_overlap();
  });
}

// y [n, outputs] = x W^T, or x W by_in. `behind_cell`: the kernel in front is the cell that made x.
gemm::Product product_of(const Sequence& s, bool by_in, const void* x, void* y, bool behind_cell) {
  const int64_t four = kGates * s.hidden, inputs = by_in ? four : s.hidden, outputs = by_in ? s.hidden : four;
  return {.dtype = s.dtype,
          .layout = s.layout,
          .by_in = by_in,
          .x = {x, s.n, inputs, inputs, 1},
          .y = {y, s.n, outputs, outputs, 1},
          .residual = {},
          .w = s.w,
          .x_is_last = behind_cell,
          .quarters_are_alike = !by_in};
}

Status copy_of_empty(const Sequence& s, const void* from, void* to, DType dtype, void* stream) {
  if (s.lengths == nullptr && s.steps > 0) return {};
  const int64_t* lengths = s.steps > 0 ? s.lengths : nullptr;
  return launch_copy({.n = s.n, .hidden = s.hidden, .lengths = lengths, .from = from, .to = to}, dtype, stream);
}

void set_step(const Sequence& s, int64_t t, CellStep& step) {
  step.block = s.layout.block_size;
  step.hidden = s.hidden;
  step.t = t;
  step.steps = s.steps;
  step.lengths = s.lengths;
}

// dW of h before each step and dpre. All steps but the first are one product. The first one is short: in one list with
// the others the engine would take both for pairs of their mean length.
Status weight_gradient(const Backward& b, Workspace workspace, Stream stream) {
  const int64_t four = kGates * b.hidden, later = std::max<int64_t>(b.steps - 1, 0) * b.n;
  const Device device = b.layout.device;
  const GradPair rest{ConstTensor(b.y, b.dtype, {later, b.hidden}, device),
                      ConstTensor(advance(b.dpre, b.n * four, b.dtype), b.dtype, {later, four}, device)};
  const GradPair first{ConstTensor(b.h0, b.dtype, {b.n, b.hidden}, device),
                       ConstTensor(b.dpre, b.dtype, {b.n, four}, device)};
  gemm::WeightGradient g{.dtype = b.dtype,
                         .dw_dtype = b.dw_dtype,
                         .layout = b.layout,
                         .pairs = std::span<const GradPair>(&rest, 1),
                         .w = b.w,
                         .dw = b.dw,
                         .accumulate = b.accumulate};
  BS_RETURN_IF_ERROR(gemm::cuda_weight_gradient(g, workspace, stream));
  if (b.h0 == nullptr || b.steps == 0) return {};
  g.pairs = std::span<const GradPair>(&first, 1);
  g.accumulate = true;
  return gemm::cuda_weight_gradient(g, workspace, stream);
}

}  // namespace

Status cuda_forward(const Forward& f, Workspace workspace, Stream stream) {
  const auto card = cuda::card_of(f.layout.device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(f.layout.device);
  BS_RETURN_IF_ERROR(on.status());
  const auto overlap = prepared(f.layout.device);
  if (!overlap.ok()) return overlap.status();
  const Plan plan = plan_forward(f.layout, f.dtype, f.n);
  const Memory memory(workspace, plan);
  const DType state = sum_dtype(f.dtype);
  const int64_t matrix = f.n * f.hidden;
  BS_RETURN_IF_ERROR(copy_of_empty(f, f.h0, f.h, f.dtype, stream.handle));
  BS_RETURN_IF_ERROR(copy_of_empty(f, f.c0, f.c, state, stream.handle));
  const WInSmemPlan one_launch = plan_w_in_smem(f.layout, f.dtype, f.steps, f.n, *card);
  if (one_launch.fits() && w_in_smem_takes(f) && !gemm::kernels_are_forced()) {
    return launch_w_in_smem(f, one_launch, memory.at, stream.handle);
  }
  const void *h = f.h0, *c = f.c0;
  for (int64_t t = 0; t < f.steps && f.n > 0; ++t) {
    ForwardCell step;
    set_step(f, t, step);
    step.n = f.n;
    if (h != nullptr) {
      step.sums = memory.at + plan.sums;
      BS_RETURN_IF_ERROR(
          gemm::cuda_product(product_of(f, false, h, memory.at + plan.sums, t > 0), memory.linear, stream));
    }
    step.pre = advance(f.pre, t * kGates * matrix, f.dtype);
    step.c_before = c;
    step.c = f.cells != nullptr ? advance(f.cells, t * matrix, state) : memory.at + plan.state;
    step.y = advance(f.y, t * matrix, f.dtype);
    step.gates = advance(f.gates, t * kGates * matrix, f.dtype);
    step.h_end = f.h;
    step.c_end = f.c;
    BS_RETURN_IF_ERROR(launch_cell(step, f.dtype, *overlap, stream.handle));
    h = step.y;
    c = step.c;
  }
  return {};
}

Status cuda_backward(const Backward& b, Workspace workspace, Stream stream) {
  const auto card = cuda::card_of(b.layout.device);
  if (!card.ok()) return card.status();
  const cuda::OnDevice on(b.layout.device);
  BS_RETURN_IF_ERROR(on.status());
  const auto overlap = prepared(b.layout.device);
  if (!overlap.ok()) return overlap.status();
  const Plan plan = plan_backward(b.layout, b.dtype, b.steps, b.n);
  const Memory memory(workspace, plan);
  const DType state = sum_dtype(b.dtype);
  const int64_t matrix = b.n * b.hidden;
  const void* sums = nullptr;
  for (int64_t t = b.n > 0 ? b.steps : 0; t-- > 0;) {
    BackwardCell step;
    set_step(b, t, step);
    step.n = b.n;
    step.sums = sums;
    step.gates = advance(b.gates, t * kGates * matrix, b.dtype);
    step.c = advance(b.cells, t * matrix, state);
    step.c_before = t > 0 ? advance(b.cells, (t - 1) * matrix, state) : static_cast<const char*>(b.c0);
    step.dy = advance(b.dy, t * matrix, b.dtype);
    step.dh_end = b.dh;
    step.dc_end = b.dc;
    step.dc = b.dc0 != nullptr ? b.dc0 : memory.at + plan.state;
    step.dpre = advance(b.dpre, t * kGates * matrix, b.dtype);
    BS_RETURN_IF_ERROR(launch_cell(step, b.dtype, *overlap, stream.handle));
    void* dh = t > 0 ? memory.at + plan.sums : b.dh0;
    if (dh == nullptr) continue;
    BS_RETURN_IF_ERROR(gemm::cuda_product(product_of(b, true, step.dpre, dh, true), memory.linear, stream));
    sums = dh;
  }
  BS_RETURN_IF_ERROR(copy_of_empty(b, b.dh, b.dh0, b.dtype, stream.handle));
  BS_RETURN_IF_ERROR(copy_of_empty(b, b.dc, b.dc0, state, stream.handle));
  return b.dw == nullptr ? Status() : weight_gradient(b, memory.linear, stream);
}

namespace {

// Calls body(overlap) on a device whose kernels are loaded.
template <class Body>
Status on_device(Device device, Body body) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  const auto overlap = prepared(device);
  return overlap.ok() ? body(*overlap) : overlap.status();
}

}  // namespace

Status cuda_cell(const ForwardCell& step, DType dtype, Device device, Stream stream) {
  return on_device(device, [&](bool overlap) { return launch_cell(step, dtype, overlap, stream.handle); });
}

Status cuda_cell(const BackwardCell& step, DType dtype, Device device, Stream stream) {
  return on_device(device, [&](bool overlap) { return launch_cell(step, dtype, overlap, stream.handle); });
}

Status cuda_copy(const CopyOfEmpty& copy, DType dtype, Device device, Stream stream) {
  return on_device(device, [&](bool) { return launch_copy(copy, dtype, stream.handle); });
}

Status cuda_multiply(const Multiply& m, DType dtype, Device device, Stream stream) {
  return on_device(device, [&](bool overlap) { return launch_multiply(m, dtype, overlap, stream.handle); });
}

size_t cuda_forward_workspace_size(const LayoutView& layout, DType dtype, int64_t n) {
  const size_t one_launch = w_in_smem_workspace_bytes(layout) + static_cast<size_t>(kAlignment);
  return std::max(static_cast<size_t>(plan_forward(layout, dtype, n).total), one_launch);
}

size_t cuda_backward_workspace_size(const LayoutView& layout, DType dtype, int64_t steps, int64_t n) {
  return static_cast<size_t>(plan_backward(layout, dtype, steps, n).total);
}

Status prepare_cuda(Device device) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  return prepared(device).status();
}

}  // namespace blocksparse::lstm
