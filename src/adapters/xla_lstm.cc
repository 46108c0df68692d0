// The LSTM's handlers. Operands, numbers and results are in the order of python/blocksparse/jax/ops/lstm.py.
#include "adapters/xla_api.h"
#include "blocksparse/c_api.h"
#include "core/text.h"

namespace blocksparse::xla {

namespace {

constexpr size_t kSave = Call::kCommon, kNumbers = Call::kCommon + 1;
constexpr int kLengths = 0;

// A row of int32 that are the halves of int64: JAX has no wider integers unless its user enables them.
Result<const int64_t*> next_lengths(Call& call, const Tensor& steps_and_n) {
  if (!call.has(kLengths)) return nullptr;
  BS_TAKE(halves, call.next_integers());
  const int64_t n = steps_and_n.rank > 1 ? steps_and_n.shape[1] : 0;
  if (static_cast<int64_t>(halves.size()) == 2 * n) return reinterpret_cast<const int64_t*>(halves.data());
  return invalid("[lstm] lengths are ", halves.size(), " halves, needs ", 2 * n, " for ", n, " sequences");
}

LstmProblem problem_of(const LayoutView& layout, const Tensor& y) {
  const bool right = y.rank > 1;
  return {.layout = layout, .dtype = y.dtype, .steps = right ? y.shape[0] : 0, .n = right ? y.shape[1] : 0};
}

Status forward(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  const bool save = call.number(kSave) != 0;
  BS_RETURN_IF_ERROR(call.buffers(5, save ? 5 : 3));
  BS_TAKE(pre, call.next_operand());
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(h0, call.next_operand());
  BS_TAKE(c0, call.next_operand());
  BS_TAKE(lengths, next_lengths(call, pre));
  LstmOutputs out;
  for (Tensor* result : {&out.y, &out.h, &out.c, &out.gates, &out.cells}) {
    if (!save && (result == &out.gates || result == &out.cells)) continue;
    BS_TAKE(made, call.next_result());
    *result = made;
  }
  BS_TAKE(stream, call.stream());
  const size_t bytes = lstm_forward_workspace_size(problem_of(layout, out.y), call.device());
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return lstm_forward(layout, {pre, values, h0, c0, lengths}, out, workspace, stream);
  });
}

Status backward(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kNumbers));
  BS_RETURN_IF_ERROR(call.buffers(10, 4));
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(h0, call.next_operand());
  BS_TAKE(c0, call.next_operand());
  BS_TAKE(y, call.next_operand());
  BS_TAKE(gates, call.next_operand());
  BS_TAKE(cells, call.next_operand());
  BS_TAKE(dy, call.next_operand());
  BS_TAKE(dh, call.next_operand());
  BS_TAKE(dc, call.next_operand());
  BS_TAKE(lengths, next_lengths(call, y));
  BS_TAKE(dpre, call.next_result());
  BS_TAKE(dw, call.next_result());
  BS_TAKE(dh0, call.next_result());
  BS_TAKE(dc0, call.next_result());
  BS_TAKE(stream, call.stream());
  const size_t bytes = lstm_backward_workspace_size(problem_of(layout, y), call.device());
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return lstm_backward(layout, {values, h0, c0, lengths, y, gates, cells}, {dy, dh, dc}, Accumulate::no,
                         {dpre, dw, dh0, dc0}, workspace, stream);
  });
}

}  // namespace

}  // namespace blocksparse::xla

extern "C" {

void* bs_xla_lstm_forward(void* call_frame) {
  return blocksparse::xla::handle("lstm", call_frame, blocksparse::xla::forward);
}
void* bs_xla_lstm_backward(void* call_frame) {
  return blocksparse::xla::handle("lstm", call_frame, blocksparse::xla::backward);
}

}  // extern "C"
