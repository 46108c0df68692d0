// The convolution of the C interface.
#include <algorithm>

#include "capi/translate.h"
#include "ops/conv/conv.h"

namespace {

using namespace blocksparse;        // NOLINT(google-build-using-namespace)
using namespace blocksparse::capi;  // NOLINT(google-build-using-namespace)

static_assert(BS_MAX_SIZES == kMaxSizes);

ConvGeometry to_geometry(const bs_conv_geometry& g) {
  ConvGeometry geometry{.rank = g.rank, .transposed = g.transposed != 0};
  const auto copy = [](const int64_t(&from)[BS_MAX_SIZES], SpatialSizes& to) {
    std::copy(std::begin(from), std::end(from), to.begin());
  };
  copy(g.kernel, geometry.kernel);
  copy(g.stride, geometry.stride);
  copy(g.dilation, geometry.dilation);
  copy(g.padding_before, geometry.padding_before);
  copy(g.padding_after, geometry.padding_after);
  copy(g.output_padding, geometry.output_padding);
  return geometry;
}

Status check_flags(const char* op, const bs_conv_geometry& g) {
  if (g.transposed == 0 || g.transposed == 1) return {};
  return invalid("[", op, "] transposed is ", g.transposed, ", needs 0 or 1");
}

// An order, if given, has one entry for each channel of the layout's inputs.
Convolution to_convolution(const bs_layout_view& layout, const bs_conv_geometry& geometry, const int32_t* order) {
  Convolution conv{.layout = to_view(layout), .geometry = to_geometry(geometry)};
  const auto channels = static_cast<size_t>(std::max<int64_t>(conv.layout.inputs(), 0));
  if (order != nullptr) conv.channel_order = {order, channels};
  return conv;
}

size_t workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                      const int32_t* channel_order, conv::WorkspaceSize* size) {
  if (layout == nullptr || geometry == nullptr || x == nullptr) return 0;
  if (!check_flags("conv", *geometry).ok()) return 0;
  return conv::workspace_size_like(to_convolution(*layout, *geometry, channel_order), to_const(x), size);
}

}  // namespace

extern "C" {

bs_status bs_conv_output_size(const bs_conv_geometry* geometry, const int64_t* size, int64_t* output) {
  return guarded([&]() -> Status {
    const char* op = "conv_output_size";
    BS_RETURN_IF_ERROR(need(op, "geometry", geometry));
    BS_RETURN_IF_ERROR(need(op, "size", size));
    BS_RETURN_IF_ERROR(need(op, "output", output));
    BS_RETURN_IF_ERROR(check_flags(op, *geometry));
    SpatialSizes in = {1, 1, 1};
    const auto rank = static_cast<std::ptrdiff_t>(std::clamp<int32_t>(geometry->rank, 0, kMaxSizes));
    std::copy(size, size + rank, in.begin());
    const auto out = conv_output_size(to_geometry(*geometry), in);
    if (!out.ok()) return out.status();
    std::copy(out->begin(), out->begin() + rank, output);
    return {};
  });
}

bs_status bs_conv_fprop(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                        const bs_tensor* w, const bs_tensor* gates, const int32_t* channel_order,
                        const bs_epilogue* epilogue, const bs_tensor* y, bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "conv_fprop";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "geometry", geometry));
    BS_RETURN_IF_ERROR(need(op, "x", x));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "y", y));
    BS_RETURN_IF_ERROR(check_flags(op, *geometry));
    return conv_fprop(to_convolution(*layout, *geometry, channel_order), to_const(x), {to_const(w), to_const(gates)},
                      to_epilogue(epilogue), to_tensor(y), to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_conv_dgrad(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* dy,
                        const bs_tensor* w, const bs_tensor* gates, const int32_t* channel_order, const bs_tensor* dx,
                        bs_workspace workspace, bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "conv_dgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "geometry", geometry));
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "w", w));
    BS_RETURN_IF_ERROR(need(op, "dx", dx));
    BS_RETURN_IF_ERROR(check_flags(op, *geometry));
    return conv_dgrad(to_convolution(*layout, *geometry, channel_order), to_const(dy), {to_const(w), to_const(gates)},
                      to_tensor(dx), to_workspace(workspace), to_stream(stream));
  });
}

bs_status bs_conv_wgrad(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                        const bs_tensor* dy, const bs_tensor* w, const bs_tensor* gates, const int32_t* channel_order,
                        int32_t accumulate, const bs_tensor* dw, const bs_tensor* dgates, bs_workspace workspace,
                        bs_stream stream) {
  return guarded([&]() -> Status {
    const char* op = "conv_wgrad";
    BS_RETURN_IF_ERROR(need(op, "layout", layout));
    BS_RETURN_IF_ERROR(need(op, "geometry", geometry));
    BS_RETURN_IF_ERROR(need(op, "x", x));
    BS_RETURN_IF_ERROR(need(op, "dy", dy));
    BS_RETURN_IF_ERROR(need(op, "dw", dw));
    BS_RETURN_IF_ERROR(check_flags(op, *geometry));
    if (accumulate != 0 && accumulate != 1) return invalid("[", op, "] accumulate is ", accumulate, ", needs 0 or 1");
    return conv_wgrad(to_convolution(*layout, *geometry, channel_order), to_const(x), to_const(dy),
                      {to_const(w), to_const(gates)}, static_cast<Accumulate>(accumulate),
                      {to_tensor(dw), to_tensor(dgates)}, to_workspace(workspace), to_stream(stream));
  });
}

size_t bs_conv_fprop_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                                    const int32_t* channel_order) {
  return workspace_size(layout, geometry, x, channel_order, conv_fprop_workspace_size);
}
size_t bs_conv_dgrad_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                                    const int32_t* channel_order) {
  return workspace_size(layout, geometry, x, channel_order, conv_dgrad_workspace_size);
}
size_t bs_conv_wgrad_workspace_size(const bs_layout_view* layout, const bs_conv_geometry* geometry, const bs_tensor* x,
                                    const int32_t* channel_order) {
  return workspace_size(layout, geometry, x, channel_order, conv_wgrad_workspace_size);
}

}  // extern "C"
