// Runs the steps on any device: the engine's products, layer norms and cells in turn. On a card each kernel begins
// while the kernel in front still runs.
#include "core/text.h"
#include "cpu/pages.h"
#include "ops/norm/norm.h"
#include "ops/sequence/deep_update.h"

namespace blocksparse::deep_update {

namespace {

using sequence::advance;
using sequence::Machine;
using sequence::StepRunner;

Status run(const Machine& on, const norm::Forward& f) {
  return on.on_card() ? norm::cuda_forward(f, on.device, on.stream) : norm::cpu_forward(f, on.isa, on.threads);
}
Status run(const Machine& on, const norm::Backward& b) {
  return on.on_card() ? norm::cuda_backward(b, on.device, on.stream) : norm::cpu_backward(b, on.isa, on.threads);
}

// Whether the gates' norm and the cell are one kernel.
bool joins_cell(const StepRunner& runner, const Forward& f) { return runner.on.on_card() && f.lengths == nullptr; }

// Computes z of a step from h before it. If norm and cell are one kernel, it leaves the gates' norm to that. `made`
// holds the step's results, at place `at`.
Status matrices(const StepRunner& runner, const Forward& f, const Made& made, char* memory, int64_t t, const void* h,
                void* z) {
  const int64_t at = f.saved != nullptr ? t : 0, sum = size_of(runner.state);
  const void* u = h;
  for (int j = 0; j < f.count; ++j) {
    const Matrix& matrix = f.matrices[static_cast<size_t>(j)];
    const int64_t groups = f.groups(j);
    char* product = advance(static_cast<void*>(memory + made.product_at(j)), at * groups * runner.one, f.dtype);
    BS_RETURN_IF_ERROR(runner.product(matrix, false, u, product, nullptr, t > 0 || j > 0));
    if (j == f.last() && joins_cell(runner, f)) return {};
    void* normed = j < f.last() ? advance(static_cast<void*>(memory + made.normed_at(j)), at * runner.one, f.dtype) : z;
    norm::Forward n;
    n.dtype = f.dtype;
    n.n = f.n;
    n.groups = groups;
    n.features = f.hidden;
    n.relu = j > 0 && j < f.last();
    n.epsilon = f.epsilon;
    n.x = product;
    n.gain = matrix.gain;
    n.shift = matrix.shift;
    n.factor = j == 0 ? advance(f.factor, t * runner.one, f.dtype) : nullptr;
    n.term = j == 1 ? advance(f.term, t * runner.one, f.dtype) : nullptr;
    n.y = normed;
    n.stats = memory + made.stats_at(j) + at * 2 * groups * f.n * sum;
    BS_RETURN_IF_ERROR(run(runner.on, n));
    u = normed;
  }
  return {};
}

// Computes the gradients of a step's products from that of z, which lies in the workspace; and of h before it, if `dh`
// is given.
Status matrices_backward(const StepRunner& runner, const Backward& b, const Made& made, const BackwardSpace& space,
                         char* memory, int64_t t, void* dh, const void* dy_before) {
  const int64_t sum = size_of(runner.state);
  const int64_t normed_at = BackwardSpace::keeps_steps(b) ? t : 0;
  const auto of_normed = [&](int j) {
    return advance(static_cast<void*>(memory + space.of_normed + space.normed.at(j)),
                   normed_at * b.groups(j) * runner.one, b.dtype);
  };
  for (int j = b.last(); j >= 0; --j) {
    const Matrix& matrix = b.matrices[static_cast<size_t>(j)];
    const int64_t groups = b.groups(j), elements = groups * runner.one;
    norm::Backward n;
    n.dtype = b.dtype;
    n.n = b.n;
    n.groups = groups;
    n.features = b.hidden;
    n.relu = j > 0 && j < b.last();
    n.x = advance(static_cast<const void*>(b.saved + made.product_at(j)), t * elements, b.dtype);
    n.gain = matrix.gain;
    n.shift = matrix.shift;
    n.factor = j == 0 ? advance(b.factor, t * runner.one, b.dtype) : nullptr;
    n.y = n.relu ? advance(static_cast<const void*>(b.saved + made.normed_at(j)), t * runner.one, b.dtype) : nullptr;
    n.stats = b.saved + made.stats_at(j) + t * 2 * groups * b.n * sum;
    n.dy = of_normed(j);
    n.dx = advance(static_cast<void*>(memory + space.products.at(j)), t * elements, b.dtype);
    n.dfactor = j == 0 ? advance(b.dfactor, t * runner.one, b.dtype) : nullptr;
    n.dterm = j == 1 ? advance(b.dterm, t * runner.one, b.dtype) : nullptr;
    if (!BackwardSpace::keeps_steps(b)) {
      n.dgain = b.grads[static_cast<size_t>(j)].gain;
      n.dshift = b.grads[static_cast<size_t>(j)].shift;
      n.accumulate = t + 1 < b.steps;
    }
    BS_RETURN_IF_ERROR(run(runner.on, n));
    void* out = j > 0 ? of_normed(j - 1) : dh;
    if (out != nullptr) {
      BS_RETURN_IF_ERROR(runner.product(matrix, true, n.dx, out, j == 0 ? dy_before : nullptr, true));
    }
  }
  return {};
}

// The gradients of gain and shift over all steps. Without steps they are zeros.
Status norm_gradient(const StepRunner& runner, const Backward& b, const Made& made, const BackwardSpace& space,
                     const char* memory, int j) {
  const Matrix& matrix = b.matrices[static_cast<size_t>(j)];
  norm::Backward n;
  n.dtype = b.dtype;
  n.n = b.steps * b.n;
  n.groups = b.groups(j);
  n.features = b.hidden;
  n.relu = j > 0 && j < b.last();
  n.x = b.saved + made.product_at(j);
  n.gain = matrix.gain;
  n.shift = matrix.shift;
  n.factor = j == 0 ? b.factor : nullptr;
  n.y = n.relu ? b.saved + made.normed_at(j) : nullptr;
  n.stats = b.saved + made.stats_at(j);
  n.dy = memory + space.of_normed + space.normed.at(j);
  n.dgain = b.grads[static_cast<size_t>(j)].gain;
  n.dshift = b.grads[static_cast<size_t>(j)].shift;
  return run(runner.on, n);
}

// dW over all steps. The first matrix reads h, which is y of the step before, so its first step is a product of its
// own.
Status weight_gradient(const StepRunner& runner, const Backward& b, const Made& made, const BackwardSpace& space,
                       const char* memory, int j) {
  const MatrixGrads& grads = b.grads[static_cast<size_t>(j)];
  const char* dz = memory + space.products.at(j);
  const auto add = [&](const void* x, const char* of, int64_t tokens, bool accumulate) {
    return runner.gradient(b.matrices[static_cast<size_t>(j)], grads.w, grads.w_dtype, x, of, tokens, accumulate);
  };
  if (j > 0) return add(b.saved + made.normed_at(j - 1), dz, b.steps * b.n, false);
  const int64_t later = std::max<int64_t>(b.steps - 1, 0) * b.n;
  BS_RETURN_IF_ERROR(add(b.y, advance(static_cast<const void*>(dz), runner.one, b.dtype), later, false));
  return b.steps == 0 ? Status() : add(b.h0, dz, b.n, true);
}

// The gates' norm and the cell, from the last matrix's product.
Status normed_cell(const StepRunner& runner, const Forward& f, const Made& made, char* memory,
                   const lstm::ForwardCell& step) {
  const int64_t at = f.saved != nullptr ? step.t : 0, sum = size_of(runner.state);
  const Matrix& gates = f.matrices[static_cast<size_t>(f.last())];
  const bool ends = step.t + 1 == f.steps;
  char* stats = memory + made.stats_at(f.last()) + at * 2 * kGates * f.n * sum;
  return norm::cuda_cell_forward(
      {.dtype = f.dtype,
       .n = f.n,
       .features = f.hidden,
       .epsilon = f.epsilon,
       .z = advance(static_cast<const void*>(memory + made.product_at(f.last())), at * kGates * runner.one, f.dtype),
       .gain = gates.gain,
       .shift = gates.shift,
       .c_before = step.c_before,
       .h = step.y,
       .c = step.c,
       .gates = step.gates,
       .stats = stats,
       .h_end = ends ? step.h_end : nullptr,
       .c_end = ends ? step.c_end : nullptr},
      f.device, runner.on.stream);
}

}  // namespace

Status run_forward(const Forward& f, Workspace workspace, Stream stream) {
  const ForwardSpace space(f);
  const auto machine = Machine::of(f.device, stream, workspace, space.linear);
  if (!machine.ok()) return machine.status();
  const StepRunner runner{f, *machine};
  auto* scratch = static_cast<char*>(workspace.data);
  if (!machine->on_card() && f.saved != nullptr) {
    advise_large_pages(f.saved, static_cast<size_t>(Made(f, f.steps).total));
  }
  char* memory = f.saved != nullptr ? f.saved : scratch + space.made;
  const Made made = f.saved != nullptr ? Made(f, f.steps) : Made::of_passing_step(f);
  BS_RETURN_IF_ERROR(runner.copy_of_empty(f.h0, f.h, f.dtype));
  BS_RETURN_IF_ERROR(runner.copy_of_empty(f.c0, f.c, runner.state));
  const void *h = f.h0, *c = f.c0;
  for (int64_t t = 0; t < f.steps && f.n > 0; ++t) {
    BS_RETURN_IF_ERROR(matrices(runner, f, made, memory, t, h, scratch));
    lstm::ForwardCell step;
    runner.set_step(t, step);
    step.n = f.n;
    step.pre = scratch;
    step.c_before = c;
    step.c = advance(static_cast<void*>(memory + made.cells), f.saved != nullptr ? t * runner.one : 0, runner.state);
    step.y = advance(f.y, t * runner.one, f.dtype);
    step.gates = f.saved == nullptr
                     ? nullptr
                     : advance(static_cast<void*>(memory + made.gates), t * kGates * runner.one, f.dtype);
    step.h_end = f.h;
    step.c_end = f.c;
    BS_RETURN_IF_ERROR(joins_cell(runner, f) ? normed_cell(runner, f, made, memory, step)
                                             : machine->cell(step, f.dtype));
    h = step.y;
    c = step.c;
  }
  return {};
}

Status run_backward(const Backward& b, Workspace workspace, Stream stream) {
  const BackwardSpace space(b);
  const auto machine = Machine::of(b.device, stream, workspace, space.linear);
  if (!machine.ok()) return machine.status();
  const StepRunner runner{b, *machine};
  auto* memory = static_cast<char*>(workspace.data);
  if (!machine->on_card()) advise_large_pages(workspace.data, workspace.bytes);
  const Made made(b, b.steps);
  const auto saved = [&](int64_t bytes, int64_t elements, DType dtype) {
    return advance(static_cast<const void*>(b.saved + bytes), elements, dtype);
  };
  const auto dy_at = [&](int64_t t) { return advance(b.dy, t * runner.one, b.dtype); };
  // The gradient of h behind a step comes from its y and from the step behind. On a card the cell adds the two; on the
  // CPU the product does.
  const bool cell_adds = machine->on_card();
  const void* of_next = nullptr;
  for (int64_t t = b.n > 0 ? b.steps : 0; t-- > 0;) {
    lstm::BackwardCell step;
    runner.set_step(t, step);
    step.n = b.n;
    step.gates = saved(made.gates, t * kGates * runner.one, b.dtype);
    step.c = saved(made.cells, t * runner.one, runner.state);
    step.c_before = t > 0 ? saved(made.cells, (t - 1) * runner.one, runner.state) : static_cast<const char*>(b.c0);
    step.dy = cell_adds || of_next == nullptr ? dy_at(t) : of_next;
    step.sums = cell_adds ? of_next : nullptr;
    step.dh_end = b.dh;
    step.dc_end = b.dc;
    step.dc = b.dc0 != nullptr ? b.dc0 : memory + space.dc;
    step.dpre = advance(static_cast<void*>(memory + space.of_normed + space.normed.at(b.last())),
                        BackwardSpace::keeps_steps(b) ? t * kGates * runner.one : 0, b.dtype);
    BS_RETURN_IF_ERROR(machine->cell(step, b.dtype));
    void* before = t > 0 ? memory + space.dh : b.dh0;
    const void* dy_before = t > 0 && !cell_adds ? dy_at(t - 1) : nullptr;
    BS_RETURN_IF_ERROR(matrices_backward(runner, b, made, space, memory, t, before, dy_before));
    of_next = before;
  }
  BS_RETURN_IF_ERROR(runner.copy_of_empty(b.dh, b.dh0, b.dtype));
  BS_RETURN_IF_ERROR(runner.copy_of_empty(b.dc, b.dc0, runner.state));
  const bool made_by_steps = !BackwardSpace::keeps_steps(b) && b.steps > 0 && b.n > 0;
  for (int j = 0; j < b.count; ++j) {
    if (!made_by_steps) BS_RETURN_IF_ERROR(norm_gradient(runner, b, made, space, memory, j));
    BS_RETURN_IF_ERROR(weight_gradient(runner, b, made, space, memory, j));
  }
  return {};
}

}  // namespace blocksparse::deep_update
