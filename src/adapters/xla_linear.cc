// The linear op's handlers. Operands, numbers and results are in the order of python/blocksparse/jax/ops/linear.py.
#include <utility>

#include "adapters/xla_api.h"
#include "blocksparse/c_api.h"
#include "core/text.h"

namespace blocksparse::xla {

namespace {

constexpr const char* kOp = "linear";
constexpr size_t kFeaturesFirst = Call::kCommon, kActivation = Call::kCommon + 1, kNumbers = Call::kCommon + 2;
constexpr int kBias = 0, kResidual = 1, kGates = 2;

// Sees [features, n] in memory as [n, features] if features_first, otherwise changes nothing.
Result<Tensor> seen(Result<Tensor> tensor, bool features_first) {
  if (!tensor.ok() || !features_first || !tensor->given()) return tensor;
  if (tensor->rank != 2) return invalid("[linear] an array of ", tensor->rank, " dimensions, needs [features, n]");
  std::swap(tensor->shape[0], tensor->shape[1]);
  std::swap(tensor->stride[0], tensor->stride[1]);
  return tensor;
}

int64_t tokens_of(const Tensor& x) { return x.rank == 2 ? x.shape[0] : 0; }

Status fprop(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  BS_RETURN_IF_ERROR(call.buffers(3, 1));
  const bool first = call.number(kFeaturesFirst) != 0;
  BS_TAKE(x, seen(call.next_operand(), first));
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(bias, call.next_optional(kBias));
  BS_TAKE(residual, seen(call.next_optional(kResidual), first));
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(y, seen(call.next_result(), first));
  BS_TAKE(stream, call.stream());
  const auto activation = static_cast<Activation>(call.number(kActivation));
  const size_t bytes = linear_fprop_workspace_size({layout, x.dtype, tokens_of(x)}, call.device());
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return linear_fprop(layout, x, {values, gates}, {bias, residual, activation}, y, workspace, stream);
  });
}

Status dgrad(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  BS_RETURN_IF_ERROR(call.buffers(3, 1));
  const bool first = call.number(kFeaturesFirst) != 0;
  BS_TAKE(dy, seen(call.next_operand(), first));
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(dx, seen(call.next_result(), first));
  BS_TAKE(stream, call.stream());
  const size_t bytes = linear_dgrad_workspace_size({layout, dy.dtype, tokens_of(dy)}, call.device());
  return call.with_workspace(
      bytes, [&](Workspace workspace) { return linear_dgrad(layout, dy, {values, gates}, dx, workspace, stream); });
}

Status wgrad(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  BS_RETURN_IF_ERROR(call.buffers(3, 1));
  const bool first = call.number(kFeaturesFirst) != 0;
  BS_TAKE(x, seen(call.next_operand(), first));
  BS_TAKE(dy, seen(call.next_operand(), first));
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(dw, call.next_result());
  BS_TAKE(stream, call.stream());
  const GradPair pair{x, dy};
  const size_t bytes = linear_wgrad_workspace_size({layout, x.dtype, tokens_of(x)}, call.device());
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return linear_wgrad(layout, {&pair, 1}, {{}, gates}, Accumulate::no, dw, workspace, stream);
  });
}

}  // namespace

}  // namespace blocksparse::xla

extern "C" {

void* bs_xla_linear_fprop(void* call_frame) {
  return blocksparse::xla::handle("linear", call_frame, blocksparse::xla::fprop);
}
void* bs_xla_linear_dgrad(void* call_frame) {
  return blocksparse::xla::handle("linear", call_frame, blocksparse::xla::dgrad);
}
void* bs_xla_linear_wgrad(void* call_frame) {
  return blocksparse::xla::handle("linear", call_frame, blocksparse::xla::wgrad);
}

}  // extern "C"
