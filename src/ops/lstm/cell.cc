// One step of the cell on the CPU, without products. A task is a block of units, of as many tokens as a vector has
// lanes.
#include <algorithm>
#include <cstring>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "gemm/cpu/kernels.h"
#include "ops/lstm/cell.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

namespace {

constexpr double kUnitFlops = 400;  // a unit costs as much as so many operations of a product

int32_t block_of(int64_t hidden) {
  int32_t block = 128;
  while (hidden % block != 0) block /= 2;
  return block;
}

// The reference uses the scalar cell, which is plain loops too.
Isa isa_of_cell(Isa isa) { return isa == Isa::reference ? Isa::scalar : isa; }

// Calls run(kernel, step, task) for all units and tokens.
template <class Cell, class Run>
Status for_each_task(Cell step, DType dtype, Isa isa, int32_t threads, Run run) {
  const CellKernel* cell = find_cell_kernel(isa_of_cell(isa), dtype);
  const gemm::ProductKernel* product = gemm::find_product_kernel(isa_of_cell(isa), dtype);
  if (cell == nullptr || product == nullptr) return no_kernel("lstm", isa, dtype);
  step.block = block_of(step.hidden);
  const int64_t lanes = product->lanes, units = step.hidden / step.block, groups = ceil_div(step.n, lanes);
  threads = worthwhile_threads(threads, kUnitFlops * static_cast<double>(step.n * step.hidden));
  parallel_for(threads, units * groups, [&](int64_t i) {
    const int64_t first = i / units * lanes;
    run(*cell, step, CellTask{.unit = i % units * step.block, .first = first, .last = std::min(first + lanes, step.n)});
  });
  return {};
}

}  // namespace

Status cpu_cell(const ForwardCell& step, DType dtype, Isa isa, int32_t threads) {
  return for_each_task(step, dtype, isa, threads,
                       [](const CellKernel& kernel, const ForwardCell& s, CellTask task) { kernel.forward(s, task); });
}

Status cpu_cell(const BackwardCell& step, DType dtype, Isa isa, int32_t threads) {
  return for_each_task(step, dtype, isa, threads, [](const CellKernel& kernel, const BackwardCell& s, CellTask task) {
    kernel.backward(s, task);
  });
}

void cpu_copy(const CopyOfEmpty& copy, DType dtype) {
  if (copy.to == nullptr) return;
  const auto bytes = static_cast<size_t>(copy.hidden * size_of(dtype));
  for (int64_t i = 0; i < copy.n; ++i) {
    if (copy.lengths != nullptr && copy.lengths[i] > 0) continue;
    char* row = static_cast<char*>(copy.to) + static_cast<size_t>(i) * bytes;
    if (copy.from != nullptr)
      std::memcpy(row, static_cast<const char*>(copy.from) + static_cast<size_t>(i) * bytes, bytes);
    else std::memset(row, 0, bytes);
  }
}

Status cpu_multiply(const Multiply& m, DType dtype, Isa isa, int32_t threads) {
  const CellKernel* cell = find_cell_kernel(isa_of_cell(isa), dtype);
  if (cell == nullptr) return no_kernel("lstm", isa, dtype);
  constexpr int64_t kPart = 1 << 14;  // elements of a task
  parallel_for(threads, ceil_div(m.count, kPart),
               [&](int64_t i) { cell->multiply(m, i * kPart, std::min((i + 1) * kPart, m.count)); });
  return {};
}

}  // namespace blocksparse::lstm
