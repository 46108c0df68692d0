// Gated linear units through the C interface.
#include "blocksparse/glu.h"

#include "capi/translate.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

}  // namespace

extern "C" {

bs_status bs_linear_glu_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w,
                              const bs_tensor* gates, const bs_epilogue* epilogue, const bs_tensor* y,
                              bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_glu_fprop";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "x", x));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "y", y));
    return linear_glu_fprop(to_view(*layout), to_const(x), {to_const(w), to_const(gates)}, to_epilogue(epilogue),
                            to_tensor(y), to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_linear_glu_fprop_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  if (layout == nullptr) return 0;
  const LinearProblem problem{.layout = to_view(*layout), .dtype = static_cast<DType>(dtype), .n = n};
  return linear_glu_fprop_workspace_size(problem, problem.layout.device);
}

bs_status bs_glu_forward(const bs_tensor* z, int32_t activation, const bs_tensor* y, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "glu_forward";
    BS_RETURN_IF_ERROR(need(op, "z", z));
    BS_RETURN_IF_ERROR(need(op, "y", y));
    return glu_forward(to_const(z), static_cast<Activation>(activation), to_tensor(y), to_stream(stream));
  });
}

bs_status bs_glu_backward(const bs_tensor* z, const bs_tensor* dy, int32_t activation, const bs_tensor* dz,
                          bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "glu_backward";
    BS_RETURN_IF_ERROR(need(op, "z", z));
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "dz", dz));
    return glu_backward(to_const(z), to_const(dy), static_cast<Activation>(activation), to_tensor(dz),
                        to_stream(stream));
  });
}

}  // extern "C"
