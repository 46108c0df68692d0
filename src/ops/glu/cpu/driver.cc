// Gated linear units on the CPU: a task is a run of groups of one token.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "ops/glu/cpu/kernels.h"

namespace blocksparse::glu {

namespace {

constexpr int64_t kTaskGroups = 256;     // one token of a wide layer is work for several threads
constexpr int64_t kLeastWork = 1 << 12;  // hidden features that are worth another thread

template <class Task, class Pass>
Status run(const Task& task, Isa isa, int32_t threads, Pass pass) {
  const GroupKernel* kernel = find_group_kernel(isa, task.dtype);
  if (kernel == nullptr) return no_kernel("glu", isa, task.dtype);
  const int64_t groups = task.groups(), runs = ceil_div(groups, kTaskGroups);
  threads = static_cast<int32_t>(std::clamp<int64_t>(task.n * task.hidden / kLeastWork, 1, threads));
  parallel_for(threads, task.n * runs, [&](int64_t i) {
    const int64_t first = i % runs * kTaskGroups;
    pass (*kernel)(task, i / runs, first, std::min(first + kTaskGroups, groups));
  });
  return {};
}

}  // namespace

Status cpu_forward(const Forward& f, Isa isa, int32_t threads) {
  if (isa == Isa::reference) {
    reference_forward(f);
    return {};
  }
  return run(f, isa, threads, [](const GroupKernel& kernel) { return kernel.forward; });
}

Status cpu_backward(const Backward& b, Isa isa, int32_t threads) {
  if (isa == Isa::reference) {
    reference_backward(b);
    return {};
  }
  return run(b, isa, threads, [](const GroupKernel& kernel) { return kernel.backward; });
}

}  // namespace blocksparse::glu
