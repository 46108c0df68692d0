// The layer norm of the C interface.
#include "blocksparse/norm.h"

#include "capi/translate.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

Status check_flag(const char* op, int32_t relu) {
  return relu == 0 || relu == 1 ? Status() : invalid("[", op, "] relu is ", relu, ", needs 0 or 1");
}

}  // namespace

extern "C" {

bs_status bs_layer_norm_forward(const bs_layer_norm_inputs* inputs, const bs_tensor* y, const bs_tensor* stats,
                                bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "layer_norm_forward";
    BS_RETURN_IF_ERROR(need(op, "inputs", inputs));
    BS_RETURN_IF_ERROR(check_flag(op, inputs->relu));
    const bs_layer_norm_inputs& in = *inputs;
    return layer_norm_forward({.x = to_const(in.x),
                               .gain = to_const(in.gain),
                               .shift = to_const(in.shift),
                               .factor = to_const(in.factor),
                               .term = to_const(in.term),
                               .relu = in.relu != 0,
                               .epsilon = in.epsilon},
                              {to_tensor(y), to_tensor(stats)}, to_stream(stream));
  });
}

bs_status bs_layer_norm_backward(const bs_layer_norm_saved* saved, const bs_tensor* dy,
                                 const bs_layer_norm_grads* grads, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "layer_norm_backward";
    BS_RETURN_IF_ERROR(need(op, "saved", saved));
    BS_RETURN_IF_ERROR(need(op, "grads", grads));
    BS_RETURN_IF_ERROR(check_flag(op, saved->relu));
    const bs_layer_norm_saved& s = *saved;
    return layer_norm_backward({.x = to_const(s.x),
                                .gain = to_const(s.gain),
                                .shift = to_const(s.shift),
                                .factor = to_const(s.factor),
                                .y = to_const(s.y),
                                .stats = to_const(s.stats),
                                .relu = s.relu != 0},
                               to_const(dy),
                               {to_tensor(grads->x), to_tensor(grads->gain), to_tensor(grads->shift),
                                to_tensor(grads->factor), to_tensor(grads->term)},
                               to_stream(stream));
  });
}

}  // extern "C"
