// Runs the steps on any device: two of the engine's products, the factor between them, and the LSTM's cell.
#include <algorithm>

#include "core/text.h"
#include "cpu/pages.h"
#include "ops/sequence/multiplicative.h"

namespace blocksparse::multiplicative {

using sequence::advance;
using sequence::Machine;
using sequence::StepRunner;

Status run_forward(const Forward& f, Workspace workspace, Stream stream) {
  const ForwardSpace space(f);
  const auto machine = Machine::of(f.device, stream, workspace, space.linear);
  if (!machine.ok()) return machine.status();
  const StepRunner runner{f, *machine};
  auto* z = static_cast<char*>(workspace.data);
  char* memory = f.saved != nullptr ? f.saved : z + space.made;
  const Made made(f, f.saved != nullptr ? f.steps : 1);
  if (!machine->on_card() && f.saved != nullptr) advise_large_pages(f.saved, static_cast<size_t>(made.total));
  BS_RETURN_IF_ERROR(runner.copy_of_empty(f.h0, f.h, f.dtype));
  BS_RETURN_IF_ERROR(runner.copy_of_empty(f.c0, f.c, runner.state));
  const void *h = f.h0, *c = f.c0;
  for (int64_t t = 0; t < f.steps && f.n > 0; ++t) {
    const int64_t at = f.saved != nullptr ? t * runner.one : 0;
    void* product = advance(static_cast<void*>(memory + made.product), at, f.dtype);
    void* m = advance(static_cast<void*>(memory + made.m), at, f.dtype);
    BS_RETURN_IF_ERROR(runner.product(f.m, false, h, product, nullptr, t > 0));
    BS_RETURN_IF_ERROR(machine->multiply(
        {.count = runner.one, .x = product, .a = advance(f.factor, t * runner.one, f.dtype), .of_a = m}, f.dtype));
    BS_RETURN_IF_ERROR(runner.product(f.gates, false, m, z, advance(f.pre, t * kGates * runner.one, f.dtype), true));
    lstm::ForwardCell step;
    runner.set_step(t, step);
    step.n = f.n;
    step.pre = z;
    step.c_before = c;
    step.c = advance(static_cast<void*>(memory + made.cells), at, runner.state);
    step.y = advance(f.y, t * runner.one, f.dtype);
    step.gates = f.saved == nullptr ? nullptr : advance(static_cast<void*>(memory + made.gates), kGates * at, f.dtype);
    step.h_end = f.h;
    step.c_end = f.c;
    BS_RETURN_IF_ERROR(machine->cell(step, f.dtype));
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
    const int64_t at = t * runner.one;
    lstm::BackwardCell step;
    runner.set_step(t, step);
    step.n = b.n;
    step.gates = saved(made.gates, kGates * at, b.dtype);
    step.c = saved(made.cells, at, runner.state);
    step.c_before = t > 0 ? saved(made.cells, at - runner.one, runner.state) : static_cast<const char*>(b.c0);
    step.dy = cell_adds || of_next == nullptr ? dy_at(t) : of_next;
    step.sums = cell_adds ? of_next : nullptr;
    step.dh_end = b.dh;
    step.dc_end = b.dc;
    step.dc = b.dc0 != nullptr ? b.dc0 : memory + space.dc;
    step.dpre = advance(b.dpre, kGates * at, b.dtype);
    BS_RETURN_IF_ERROR(machine->cell(step, b.dtype));
    void* of_product = advance(static_cast<void*>(memory + space.of_product), at, b.dtype);
    BS_RETURN_IF_ERROR(runner.product(b.gates, true, step.dpre, memory + space.dm, nullptr, true));
    BS_RETURN_IF_ERROR(machine->multiply({.count = runner.one,
                                          .x = memory + space.dm,
                                          .a = advance(b.factor, at, b.dtype),
                                          .b = saved(made.product, at, b.dtype),
                                          .of_a = of_product,
                                          .of_b = advance(b.dfactor, at, b.dtype)},
                                         b.dtype));
    void* before = t > 0 ? memory + space.dh : b.dh0;
    const void* dy_before = t > 0 && !cell_adds ? dy_at(t - 1) : nullptr;
    if (before != nullptr) {
      BS_RETURN_IF_ERROR(runner.product(b.m, true, of_product, before, dy_before, true));
    }
    of_next = before;
  }
  BS_RETURN_IF_ERROR(runner.copy_of_empty(b.dh, b.dh0, b.dtype));
  BS_RETURN_IF_ERROR(runner.copy_of_empty(b.dc, b.dc0, runner.state));
  BS_RETURN_IF_ERROR(runner.gradient(b.gates, b.dw, b.dw_dtype, b.saved + made.m, b.dpre, b.steps * b.n, false));
  // h before a step is y of the step before, so the first step is a product of its own.
  const char* of_products = memory + space.of_product;
  const auto add = [&](const void* x, const char* of, int64_t tokens, bool accumulate) {
    return runner.gradient(b.m, b.dw_m, b.dw_m_dtype, x, of, tokens, accumulate);
  };
  const int64_t later = std::max<int64_t>(b.steps - 1, 0) * b.n;
  BS_RETURN_IF_ERROR(add(b.y, of_products + runner.one * size_of(b.dtype), later, false));
  return b.steps == 0 ? Status() : add(b.h0, of_products, b.n, true);
}

}  // namespace blocksparse::multiplicative
