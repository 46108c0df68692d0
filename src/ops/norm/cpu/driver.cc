// The layer norm on the CPU. A task is a row; for the gradients of gain and shift it is a strip of columns.
#include <algorithm>
#include <type_traits>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "ops/norm/cpu/kernels.h"

namespace blocksparse::norm {

namespace {

constexpr int64_t kLeastWork = 1 << 14;  // elements that justify another thread
// Tokens, in bytes of x, whose gradients of columns are summed in one go. A round has a group for each thread, so
// columns find in L2 what rows have read. The bits of the sums do not depend on rounds.
constexpr int64_t kGroupBytes = 256 << 10;

int32_t worthwhile(int32_t threads, int64_t elements) {
  return static_cast<int32_t>(std::clamp<int64_t>(elements / kLeastWork, 1, threads));
}

Result<const RowKernel*> kernel_for(Isa isa, DType dtype) {
  if (isa == Isa::reference) isa = Isa::scalar;  // plain loops too
  const RowKernel* kernel = find_row_kernel(isa, dtype);
  if (kernel != nullptr) return kernel;
  return no_kernel("layer_norm", isa, dtype);
}

// A pass over some tokens, which adds to what the tokens before gave to dgain and dshift.
Backward tokens_of(const Backward& b, int64_t begin, int64_t count) {
  Backward part = b;
  const int64_t elements = begin * b.groups * b.features;
  const auto move = [&]<class P>(P*& p, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
    if (p != nullptr) p = static_cast<Byte*>(p) + bytes;
  };
  for (const void** p : {&part.x, &part.factor, &part.y, &part.dy}) move(*p, elements * size_of(b.dtype));
  for (void** p : {&part.dx, &part.dfactor, &part.dterm}) move(*p, elements * size_of(b.dtype));
  move(part.stats, begin * b.groups * 2 * size_of(sum_dtype(b.dtype)));
  part.n = count;
  part.accumulate = b.accumulate || begin > 0;
  return part;
}

}  // namespace

Status cpu_forward(const Forward& f, Isa isa, int32_t threads) {
  const auto kernel = kernel_for(isa, f.dtype);
  if (!kernel.ok()) return kernel.status();
  threads = worthwhile(threads, f.rows() * f.features);
  parallel_for(threads, f.rows(), [&](int64_t row) { (*kernel)->forward(f, row); });
  return {};
}

Status cpu_backward(const Backward& b, Isa isa, int32_t threads) {
  const auto kernel = kernel_for(isa, b.dtype);
  if (!kernel.ok()) return kernel.status();
  threads = worthwhile(threads, b.rows() * b.features);
  const int64_t group = std::max<int64_t>(1, kGroupBytes / (b.groups * b.features * size_of(b.dtype)));
  const int64_t strips = ceil_div(b.features, kColumnsOfTask);
  int64_t begin = 0;
  do {
    const Backward round = tokens_of(b, begin, std::min(group * threads, b.n - begin));
    if (b.dx != nullptr) parallel_for(threads, round.rows(), [&](int64_t row) { (*kernel)->backward(round, row); });
    const auto columns = [&](int64_t i) {
      int64_t first = 0;
      do {
        const Backward part = tokens_of(round, first, std::min(group, round.n - first));
        (*kernel)->columns(part, i / strips, i % strips * kColumnsOfTask);
        first += group;
      } while (first < round.n);
    };
    if (b.dgain != nullptr) parallel_for(threads, b.groups * strips, columns);
    begin += group * threads;
  } while (begin < b.n);  // without tokens the gradients are 0
  return {};
}

}  // namespace blocksparse::norm
