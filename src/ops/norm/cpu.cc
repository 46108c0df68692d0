// The layer norm on the CPU: rows are tasks; the gradients of gain and shift, strips of columns.
#include <algorithm>

#include "core/text.h"
#include "cpu/threads.h"
#include "ops/norm/kernels.h"

namespace blocksparse::norm {

namespace {

constexpr int64_t kLeastWork = 1 << 14;  // elements that are worth another thread

int32_t worthwhile(int32_t threads, int64_t elements) {
  return static_cast<int32_t>(std::clamp<int64_t>(elements / kLeastWork, 1, threads));
}

Result<const RowKernel*> kernel_for(Isa isa, DType dtype) {
  if (isa == Isa::reference) isa = Isa::scalar;  // plain loops as well
  const RowKernel* kernel = find_row_kernel(isa, dtype);
  if (kernel != nullptr) return kernel;
  return Status(StatusCode::unsupported, "[layer_norm] there is no kernel of this instruction set for this dtype");
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
  if (b.dx != nullptr) parallel_for(threads, b.rows(), [&](int64_t row) { (*kernel)->backward(b, row); });
  if (b.dgain == nullptr) return {};
  const int64_t strips = (b.features + kStrip - 1) / kStrip;
  parallel_for(threads, b.groups * strips, [&](int64_t i) { (*kernel)->columns(b, i / strips, i % strips * kStrip); });
  return {};
}

}  // namespace blocksparse::norm
