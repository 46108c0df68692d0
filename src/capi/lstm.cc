// The LSTM op of the C interface.
#include "capi/translate.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

size_t workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t steps, int64_t n,
                      size_t (*size)(const LstmProblem&, Device)) {
  if (layout == nullptr) return 0;
  const LstmProblem problem{.layout = to_view(*layout), .dtype = static_cast<DType>(dtype), .steps = steps, .n = n};
  return size(problem, problem.layout.device);
}

}  // namespace

extern "C" {

bs_status bs_lstm_forward(const bs_layout_view* layout, const bs_tensor* pre, const bs_tensor* w, const bs_tensor* h0,
                          const bs_tensor* c0, const int64_t* lengths, const bs_lstm_outputs* outputs,
                          bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    BS_RETURN_IF_ERROR(need("lstm_forward", "layout", layout));
    BS_RETURN_IF_ERROR(need("lstm_forward", "outputs", outputs));
    const bs_lstm_outputs& o = *outputs;
    return lstm_forward(to_view(*layout), {to_const(pre), to_const(w), to_const(h0), to_const(c0), lengths},
                        {to_tensor(o.y), to_tensor(o.h), to_tensor(o.c), to_tensor(o.gates), to_tensor(o.cells)},
                        to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_lstm_backward(const bs_layout_view* layout, const bs_lstm_saved* saved, const bs_tensor* dy,
                           const bs_tensor* dh, const bs_tensor* dc, int32_t accumulate, const bs_lstm_grads* grads,
                           bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "lstm_backward";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "saved", saved));
    BS_RETURN_IF_ERROR(need(op, "grads", grads));
    if (accumulate != 0 && accumulate != 1) return invalid("[", op, "] accumulate is ", accumulate, ", needs 0 or 1");
    const bs_lstm_saved& s = *saved;
    return lstm_backward(
        to_view(*layout),
        {to_const(s.w), to_const(s.h0), to_const(s.c0), s.lengths, to_const(s.y), to_const(s.gates), to_const(s.cells)},
        {to_const(dy), to_const(dh), to_const(dc)}, static_cast<Accumulate>(accumulate),
        {to_tensor(grads->pre), to_tensor(grads->w), to_tensor(grads->h0), to_tensor(grads->c0)},
        to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_lstm_forward_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t steps, int64_t n) {
  return workspace_size(layout, dtype, steps, n, lstm_forward_workspace_size);
}
size_t bs_lstm_backward_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t steps, int64_t n) {
  return workspace_size(layout, dtype, steps, n, lstm_backward_workspace_size);
}

}  // extern "C"
