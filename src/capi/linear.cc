// The linear op through the C interface.
#include <span>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "blocksparse/c_api.h"
#include "capi/translate.h"
#include "core/text.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

size_t workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n,
                      size_t (*size)(const LinearProblem&, Device)) {
  if (layout == nullptr) return 0;
  const LinearProblem problem{.layout = to_view(*layout), .dtype = static_cast<DType>(dtype), .n = n};
  return size(problem, problem.layout.device);
}

}  // namespace

extern "C" {

bs_status bs_linear_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w, const bs_tensor* gates,
                          const bs_epilogue* epilogue, const bs_tensor* y, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_fprop";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "x", x));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "y", y));
    return linear_fprop(to_view(*layout), to_const(x), {to_const(w), to_const(gates)}, to_epilogue(epilogue),
                        to_tensor(y), to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_linear_dgrad(const bs_layout_view* layout, const bs_tensor* dy, const bs_tensor* w, const bs_tensor* gates,
                          const bs_tensor* dx, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_dgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "dx", dx));
    return linear_dgrad(to_view(*layout), to_const(dy), {to_const(w), to_const(gates)}, to_tensor(dx),
                        to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_linear_wgrad(const bs_layout_view* layout, int64_t pairs, const bs_tensor* x, const bs_tensor* dy,
                          const bs_tensor* w, const bs_tensor* gates, int32_t accumulate, const bs_tensor* dw,
                          const bs_tensor* dgates, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "linear_wgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "dw", dw));
    if (pairs < 0) return invalid("[", op, "] pairs is ", pairs, ", needs 0 or more");
    if (pairs > 0) {
      BS_RETURN_IF_ERROR(need(op, "x", x));
      BS_RETURN_IF_ERROR(need(op, "dy", dy));
    }
    if (accumulate != 0 && accumulate != 1) return invalid("[", op, "] accumulate is ", accumulate, ", needs 0 or 1");
    // One pair is the usual case and needs no allocation.
    const auto pair_at = [&](int64_t i) { return GradPair{to_const(x + i), to_const(dy + i)}; };
    const GradPair single = pairs == 1 ? pair_at(0) : GradPair{};
    std::vector<GradPair> many;
    for (int64_t i = 0; pairs > 1 && i < pairs; ++i) many.push_back(pair_at(i));
    const std::span<const GradPair> list = pairs == 1 ? std::span(&single, 1) : std::span<const GradPair>(many);
    return linear_wgrad(to_view(*layout), list, {to_const(w), to_const(gates)}, static_cast<Accumulate>(accumulate),
                        {to_tensor(dw), to_tensor(dgates)}, to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_linear_fprop_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return workspace_size(layout, dtype, n, linear_fprop_workspace_size);
}
size_t bs_linear_dgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return workspace_size(layout, dtype, n, linear_dgrad_workspace_size);
}
size_t bs_linear_wgrad_workspace_size(const bs_layout_view* layout, int32_t dtype, int64_t n) {
  return workspace_size(layout, dtype, n, linear_wgrad_workspace_size);
}

bs_status bs_bias_gradient(const bs_tensor* dy, const bs_tensor* dbias, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "bias_gradient";
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "dbias", dbias));
    return bias_gradient(to_const(dy), to_tensor(dbias), to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_bias_gradient_workspace_size(const bs_tensor* dy) {
  return dy == nullptr ? 0 : bias_gradient_workspace_size(to_const(dy));
}

}  // extern "C"
