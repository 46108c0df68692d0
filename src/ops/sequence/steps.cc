#include "ops/sequence/steps.h"

#include <algorithm>

#include "blocksparse/blocksparse.h"

namespace blocksparse::sequence {

Status StepRunner::product(const Weight& w, bool by_in, const void* x, void* y, const void* residual,
                           bool behind) const {
  const int64_t inputs = by_in ? w.rows() : s.hidden, outputs = by_in ? s.hidden : w.rows();
  return on.product({.dtype = s.dtype,
                     .layout = w.layout,
                     .by_in = by_in != w.layout.transposed,
                     .x = {x, s.n, inputs, inputs, 1},
                     .y = {y, s.n, outputs, outputs, 1},
                     .residual = {residual, s.n, outputs, outputs, 1},
                     .w = w.w,
                     .x_is_last = behind,
                     .quarters_are_alike = outputs == 4 * inputs});
}

Status StepRunner::gradient(const Weight& w, void* dw, DType dw_dtype, const void* x, const void* dy, int64_t tokens,
                            bool accumulate) const {
  if (dw == nullptr || w.layout.blocks == 0) return {};
  const GradPair pair{ConstTensor(x, s.dtype, {tokens, s.hidden}, s.device),
                      ConstTensor(dy, s.dtype, {tokens, w.rows()}, s.device)};
  gemm::WeightGradient g{.dtype = s.dtype,
                         .dw_dtype = dw_dtype,
                         .layout = w.layout,
                         .pairs = std::span<const GradPair>(&pair, 1),
                         .w = w.w,
                         .dw = dw,
                         .accumulate = accumulate,
                         .exchanged = w.layout.transposed};
  g.layout.transposed = false;
  return on.gradient(g);
}

void StepRunner::set_step(int64_t t, lstm::CellStep& step) const {
  step.hidden = s.hidden;
  step.t = t;
  step.steps = s.steps;
  step.lengths = s.lengths;
}

Status StepRunner::copy_of_empty(const void* from, void* to, DType dtype) const {
  if (to == nullptr || (s.lengths == nullptr && s.steps > 0)) return {};
  const int64_t* lengths = s.steps > 0 ? s.lengths : nullptr;
  return on.copy({.n = s.n, .hidden = s.hidden, .lengths = lengths, .from = from, .to = to}, dtype);
}

namespace {

// Whether [steps, n, H] fits into any memory.
bool fits(const Steps& s) {
  constexpr int64_t kMostElements = int64_t{1} << 40;
  return s.n <= kMostElements / s.hidden && s.steps <= kMostElements / std::max<int64_t>(s.n * s.hidden, 1);
}

bool is_hidden(int64_t hidden) { return hidden >= 8 && hidden % 8 == 0; }

}  // namespace

bool is_right(const Steps& s) {
  return size_of(s.dtype) > 0 && s.steps >= 0 && s.n >= 0 && is_hidden(s.hidden) && fits(s);
}

Status check_steps(const char* op, const ConstTensor& factor, Steps& s) {
  if (factor.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (!factor.given()) return invalid("[", op, "] factor is not given");
  BS_RETURN_IF_ERROR(check_tensor({op, "factor", factor}));
  if (factor.rank != 3 || !is_hidden(factor.shape[2])) {
    return invalid("[", op, "] factor is ", shape_text(factor), ", needs [steps, n, H] with H a multiple of 8");
  }
  s.dtype = factor.dtype;
  s.device = factor.device;
  s.steps = factor.shape[0];
  s.n = factor.shape[1];
  s.hidden = factor.shape[2];
  return fits(s) ? Status() : invalid("[", op, "] factor is ", shape_text(factor), ", too large");
}

Status check_layout(const char* op, const char* name, const LayoutView& layout, int64_t rows, const Steps& s) {
  if (layout.index == nullptr) return invalid("[", op, "] ", name, " is null");
  if (layout.device != s.device) {
    return invalid("[", op, "] ", name, "'s tables are not on the device of factor; copy Layout::index() there");
  }
  if (layout.outputs() == rows && layout.inputs() == s.hidden) return {};
  return invalid("[", op, "] ", name, " is ", layout.outputs(), " x ", layout.inputs(), ", needs ", rows, " x ",
                 s.hidden);
}

Status check_saved(const char* op, const Workspace& saved, int64_t needed) {
  if (saved.data == nullptr && saved.bytes > 0) {
    return invalid("[", op, "] saved is null, but has ", saved.bytes, " bytes");
  }
  if (saved.bytes < static_cast<size_t>(needed)) {
    return invalid("[", op, "] saved has ", saved.bytes, " bytes, needs ", needed);
  }
  if (reinterpret_cast<uintptr_t>(saved.data) % 64 != 0) return invalid("[", op, "] saved needs an alignment of 64");
  return {};
}

size_t forward_product_bytes(const LayoutView& layout, const Steps& s) {
  return gemm::workspace_size(gemm::Pass::fprop, layout, s.dtype, s.n, s.device);
}

size_t backward_product_bytes(const LayoutView& layout, const Steps& s) {
  size_t bytes = gemm::workspace_size(gemm::Pass::dgrad, layout, s.dtype, s.n, s.device);
  for (const int64_t steps : {s.steps, s.steps - 1, std::min<int64_t>(s.steps, 1)}) {
    bytes = std::max(bytes, gemm::workspace_size(gemm::Pass::wgrad, layout, s.dtype, steps * s.n, s.device));
  }
  return bytes;
}

}  // namespace blocksparse::sequence
