// The multiplicative LSTM of the C interface.
#include "blocksparse/multiplicative.h"

#include "capi/translate.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

Status translate(const char* op, const bs_multiplicative_inputs* given, MultiplicativeInputs& in) {
  BS_RETURN_IF_ERROR(need(op, "inputs", given));
  BS_RETURN_IF_ERROR(need(op, "layout_m", given->layout_m));
  BS_RETURN_IF_ERROR(need(op, "layout", given->layout));
  in = {.layout_m = to_view(*given->layout_m),
        .layout = to_view(*given->layout),
        .w_m = to_const(given->w_m),
        .w = to_const(given->w),
        .factor = to_const(given->factor),
        .pre = to_const(given->pre),
        .h0 = to_const(given->h0),
        .c0 = to_const(given->c0),
        .lengths = given->lengths};
  return {};
}

size_t size_of_inputs(const bs_multiplicative_inputs* given, size_t (*size)(const MultiplicativeProblem&, Device)) {
  MultiplicativeInputs in;
  if (!translate("multiplicative", given, in).ok()) return 0;
  const ConstTensor& factor = in.factor;
  if (factor.rank != 3 || factor.shape[2] != in.layout_m.inputs()) return 0;
  return size({.layout_m = in.layout_m,
               .layout = in.layout,
               .dtype = factor.dtype,
               .steps = factor.shape[0],
               .n = factor.shape[1]},
              factor.device);
}

}  // namespace

extern "C" {

bs_status bs_multiplicative_forward(const bs_multiplicative_inputs* inputs, const bs_tensor* y, const bs_tensor* h,
                                    const bs_tensor* c, bs_workspace saved, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    MultiplicativeInputs in;
    BS_RETURN_IF_ERROR(translate("multiplicative_forward", inputs, in));
    return multiplicative_forward(in, {to_tensor(y), to_tensor(h), to_tensor(c), to_workspace(saved)},
                                  to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_multiplicative_backward(const bs_multiplicative_inputs* inputs, const bs_tensor* y, bs_workspace saved,
                                     const bs_tensor* dy, const bs_tensor* dh, const bs_tensor* dc,
                                     const bs_multiplicative_grads* grads, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "multiplicative_backward";
    MultiplicativeInputs in;
    BS_RETURN_IF_ERROR(translate(op, inputs, in));
    BS_RETURN_IF_ERROR(need(op, "grads", grads));
    const bs_multiplicative_grads& g = *grads;
    return multiplicative_backward(
        in, {to_const(y), to_workspace(saved)}, {to_const(dy), to_const(dh), to_const(dc)},
        {to_tensor(g.w_m), to_tensor(g.w), to_tensor(g.factor), to_tensor(g.pre), to_tensor(g.h0), to_tensor(g.c0)},
        to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_multiplicative_saved_size(const bs_multiplicative_inputs* inputs) {
  return size_of_inputs(inputs, multiplicative_saved_size);
}
size_t bs_multiplicative_forward_workspace_size(const bs_multiplicative_inputs* inputs) {
  return size_of_inputs(inputs, multiplicative_forward_workspace_size);
}
size_t bs_multiplicative_backward_workspace_size(const bs_multiplicative_inputs* inputs) {
  return size_of_inputs(inputs, multiplicative_backward_workspace_size);
}

}  // extern "C"
