// The handler of gated linear units; operands and numbers in the order of python/blocksparse/jax/ops/glu.py. The
// pointwise half on its own, and its derivatives, are left to XLA, which fuses them with what is around them.
#include "adapters/xla_api.h"
#include "blocksparse/c_api.h"
#include "core/text.h"

namespace blocksparse::xla {

namespace {

constexpr size_t kActivation = Call::kCommon, kNumbers = Call::kCommon + 1;
constexpr int kBias = 0, kGates = 1;

Status fprop(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  BS_RETURN_IF_ERROR(call.buffers(3, 1));
  BS_TAKE(x, call.next_operand());
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(bias, call.next_optional(kBias));
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(y, call.next_result());
  BS_TAKE(stream, call.stream());
  const auto activation = static_cast<Activation>(call.number(kActivation));
  const int64_t n = x.rank == 2 ? x.shape[0] : 0;
  const size_t bytes = linear_glu_fprop_workspace_size({layout, x.dtype, n}, call.device());
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return linear_glu_fprop(layout, x, {values, gates}, {bias, {}, activation}, y, workspace, stream);
  });
}

}  // namespace

}  // namespace blocksparse::xla

extern "C" void* bs_xla_linear_glu_fprop(void* call_frame) {
  return blocksparse::xla::handle("linear_glu", call_frame, blocksparse::xla::fprop);
}
