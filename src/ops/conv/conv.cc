// The edge of the convolution: checks once, then hands on to a device.
#include "ops/conv/conv.h"

#include <algorithm>
#include <cstring>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "ops/conv/geometry.h"

namespace blocksparse {

using namespace conv;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int64_t kMostFilters = int64_t{1} << 40;  // blocks * taps: more do not fit into any memory

// What every call has: its name, its layout and geometry, and what the caller calls the tensor with the sizes of x.
struct Call {
  const char *op, *x_name, *y_name;
  const LayoutView& layout;
  const ConvGeometry& geometry;
};

int64_t x_channels(const LayoutView& v) { return v.transposed ? v.out_features : v.in_features; }
int64_t y_channels(const LayoutView& v) { return v.transposed ? v.in_features : v.out_features; }
int64_t taps_of(const ConvGeometry& g) { return gather_of(g, false).taps(); }

Region region_of_images(const char* name, const Images& a, DType dtype) {
  return {name, a.data, one_row(a.n * a.image_stride()), size_of(dtype)};
}

Status check_setting(const Call& c, Device device) {
  BS_RETURN_IF_ERROR(check_device_type(c.op, device));
  if (device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (c.layout.index == nullptr) return invalid("[", c.op, "] layout is null");
  if (c.layout.device != device) {
    return invalid("[", c.op, "] the layout's tables are not on the device of ", c.x_name,
                   "; copy Layout::index() there");
  }
  BS_RETURN_IF_ERROR(check_geometry(c.op, c.geometry));
  if (c.layout.blocks * taps_of(c.geometry) <= kMostFilters) return {};
  return invalid("[", c.op, "] ", c.layout.blocks, " blocks of ", taps_of(c.geometry), " taps are too many");
}

// x and y (or their gradients): right by themselves, of one order, and of sizes that belong together.
struct Pair {
  Images x, y;
};
Result<Pair> check_pair(const Call& c, const ConstTensor& x, const ConstTensor& y, Orders& orders) {
  const Named named_x{c.op, c.x_name, x}, named_y{c.op, c.y_name, y};
  const int32_t rank = c.geometry.rank;
  auto checked_x = check_images(named_x, x_channels(c.layout), rank, orders);
  if (!checked_x.ok()) return checked_x.status();
  auto checked_y = check_images(named_y, y_channels(c.layout), rank, orders);
  if (!checked_y.ok()) return checked_y.status();
  BS_RETURN_IF_ERROR(check_dtype(named_y, x.dtype));
  BS_RETURN_IF_ERROR(check_device(named_y, x.device));
  SpatialSizes size = {};
  for (int32_t i = 0; i < rank; ++i) size[static_cast<size_t>(i)] = x.shape[static_cast<size_t>(i) + 2];
  const auto needed = output_size(c.op, c.geometry, size);
  if (!needed.ok()) return needed.status();
  bool same = checked_x->n == checked_y->n;
  for (size_t i = 0; i < static_cast<size_t>(rank); ++i) same = same && y.shape[i + 2] == (*needed)[i];
  if (!same) {
    return invalid("[", c.op, "] ", c.y_name, " is ", shape_text(y), ", ", c.x_name, " of ", shape_text(x),
                   " needs n = ", checked_x->n, " and sizes ", sizes_text(*needed, rank));
  }
  return Pair{*checked_x, *checked_y};
}

Status check_weights(const Call& c, const Weights& w, DType dtype, Device device) {
  const int64_t b = c.layout.block_size;
  if (w.values.given()) {
    const Named values{c.op, "w", w.values};
    BS_RETURN_IF_ERROR(check_contiguous(values, {c.layout.blocks, taps_of(c.geometry), b, b}));
    BS_RETURN_IF_ERROR(check_dtype(values, dtype));
    BS_RETURN_IF_ERROR(check_device(values, device));
  }
  if (w.gates.given()) {
    const Named gates{c.op, "gates", w.gates};
    BS_RETURN_IF_ERROR(check_contiguous(gates, {c.layout.blocks}));
    BS_RETURN_IF_ERROR(check_dtype(gates, sum_dtype(dtype)));
    BS_RETURN_IF_ERROR(check_device(gates, device));
  }
  return {};
}

Status check_epilogue(const Call& c, const Epilogue& epilogue, const ConstTensor& y, const Images& of_y, Orders& orders,
                      Images& residual) {
  if (epilogue.bias.given()) {
    const Named bias{c.op, "bias", epilogue.bias};
    BS_RETURN_IF_ERROR(check_contiguous(bias, {of_y.channels}));
    BS_RETURN_IF_ERROR(check_dtype(bias, y.dtype));
    BS_RETURN_IF_ERROR(check_device(bias, y.device));
  }
  if (epilogue.residual.given()) {
    const Named named{c.op, "residual", epilogue.residual};
    const auto checked = check_images(named, of_y.channels, c.geometry.rank, orders);
    if (!checked.ok()) return checked.status();
    BS_RETURN_IF_ERROR(check_dtype(named, y.dtype));
    BS_RETURN_IF_ERROR(check_device(named, y.device));
    residual = *checked;
    if (residual.n != of_y.n || residual.size != of_y.size) {
      return invalid("[", c.op, "] residual is ", shape_text(epilogue.residual), ", needs the shape of ", c.y_name,
                     ", ", shape_text(y));
    }
  }
  if (epilogue.activation < Activation::none || epilogue.activation > Activation::silu) {
    return invalid("[", c.op, "] activation is ", static_cast<int32_t>(epilogue.activation),
                   ", needs 0 (none), 1 (relu), 2 (gelu) or 3 (silu)");
  }
  return {};
}

// A permutation of the channels of x, where it can be looked at. `seen` has room for a byte each.
Status check_order(const Call& c, const int32_t* order, Device device, void* seen) {
  if (order == nullptr || device.type != DeviceType::cpu) return {};
  const int64_t channels = x_channels(c.layout);
  auto* marks = static_cast<char*>(seen);
  std::memset(marks, 0, static_cast<size_t>(channels));
  for (int64_t i = 0; i < channels; ++i) {
    const int64_t channel = order[i];
    if (channel < 0 || channel >= channels) {
      return invalid("[", c.op, "] channel_order[", i, "] is ", channel, ", needs 0 to ", channels - 1);
    }
    if (marks[channel] != 0) return invalid("[", c.op, "] channel_order holds channel ", channel, " twice");
    marks[channel] = 1;
  }
  return {};
}

Product product_of(const LayoutView& layout, const ConvGeometry& geometry, Pass pass, const Pair& pair, DType dtype) {
  const bool backward = pass == Pass::dgrad;
  return {.dtype = dtype,
          .layout = layout,
          .by_in = layout.transposed != backward,
          .gather = gather_of(geometry, geometry.transposed != backward),
          .x = backward ? pair.y : pair.x,
          .y = backward ? pair.x : pair.y};
}

WeightGradient gradient_of(const LayoutView& layout, const ConvGeometry& geometry, const Pair& pair, DType dtype) {
  LayoutView plain = layout;
  plain.transposed = false;
  // x is gathered, dy by a transposed convolution; rows are those of the layout as it is stored.
  return {.dtype = dtype,
          .layout = plain,
          .gather = gather_of(geometry, false),
          .gathers_rows = geometry.transposed != layout.transposed,
          .rows = layout.transposed ? pair.x : pair.y,
          .columns = layout.transposed ? pair.y : pair.x};
}

void set_order(Images& a, const Orders& orders) { a.channels_last = orders.channels_last; }

template <class Problem>
size_t workspace_size(const Problem& problem, Device device, int64_t channels) {
  if (device.type == DeviceType::cuda) return cuda_workspace_size(problem);
  return std::max(cpu_workspace_size(problem), static_cast<size_t>(channels));  // check_order() uses it first
}

struct Tensors {
  const ConstTensor& x;  // what is read
  const Weights& w;
  const int32_t* order;
  const Epilogue& epilogue;
  const Tensor& y;  // what is written
};

Status run_product(const Call& c, Pass pass, const Tensors& t, Workspace workspace, Stream stream) {
  const bool backward = pass == Pass::dgrad;
  const ConstTensor written = t.y;
  const DType dtype = t.x.dtype;
  const Device device = t.x.device;
  BS_RETURN_IF_ERROR(check_setting(c, device));
  Orders orders;
  const auto pair = backward ? check_pair(c, written, t.x, orders) : check_pair(c, t.x, written, orders);
  if (!pair.ok()) return pair.status();
  if (!t.w.values.given()) return invalid("[", c.op, "] w is not given");
  BS_RETURN_IF_ERROR(check_weights(c, t.w, dtype, device));
  Product p = product_of(c.layout, c.geometry, pass, *pair, dtype);
  BS_RETURN_IF_ERROR(check_epilogue(c, t.epilogue, written, p.y, orders, p.residual));
  for (Images* a : {&p.x, &p.y, &p.residual}) set_order(*a, orders);
  p.w = t.w.values.data;
  p.gates = t.w.gates.data;
  p.bias = t.epilogue.bias.data;
  p.activation = t.epilogue.activation;
  (backward ? p.y_channels : p.x_channels) = t.order;
  const int64_t area = int64_t{c.layout.block_size} * c.layout.block_size, size = size_of(dtype);
  const Region read[] = {region_of_images(backward ? c.y_name : c.x_name, p.x, dtype),
                         {"w", p.w, one_row(c.layout.blocks * p.gather.taps() * area), size},
                         {"gates", p.gates, one_row(c.layout.blocks), size_of(sum_dtype(dtype))},
                         {"bias", p.bias, one_row(p.y.channels), size},
                         region_of_images("residual", p.residual, dtype),
                         {"channel_order", t.order, one_row(x_channels(c.layout)), 4}};
  BS_RETURN_IF_ERROR(check_disjoint(c.op, region_of_images(backward ? c.x_name : c.y_name, p.y, dtype), read));
  BS_RETURN_IF_ERROR(check_stream(c.op, stream));
  if (p.y.n == 0 || p.y.channels == 0) return {};
  BS_RETURN_IF_ERROR(check_workspace(c.op, workspace, workspace_size(p, device, x_channels(c.layout)), device));
  BS_RETURN_IF_ERROR(check_order(c, t.order, device, workspace.data));
  if (device.type == DeviceType::cuda) return cuda_product(p, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_product(p, *isa, workspace, threads_for(stream.threads));
}

// dW and the gradient of the gates: right by themselves, and apart from what is read.
Status check_gradients(const Call& c, const WeightGradient& g, const Weights& w, const int32_t* order,
                       const WeightGrads& grads, Device device) {
  const int64_t b = c.layout.block_size, taps = g.gather.taps();
  const ConstTensor dw = grads.values, dgates = grads.gates;
  const DType sums = sum_dtype(g.dtype);
  BS_RETURN_IF_ERROR(check_contiguous({c.op, "dw", dw}, {c.layout.blocks, taps, b, b}));
  BS_RETURN_IF_ERROR(check_device({c.op, "dw", dw}, device));
  BS_RETURN_IF_ERROR(check_gradient_dtype({c.op, "dw", dw}, g.dtype));
  BS_RETURN_IF_ERROR(check_weights(c, w, g.dtype, device));
  if (dgates.given()) {
    const Named named{c.op, "dgates", dgates};
    BS_RETURN_IF_ERROR(check_contiguous(named, {c.layout.blocks}));
    BS_RETURN_IF_ERROR(check_dtype(named, sums));
    BS_RETURN_IF_ERROR(check_device(named, device));
    if (!w.values.given()) return invalid("[", c.op, "] dgates needs w, which is not given");
  }
  const int64_t filters = c.layout.blocks * taps * b * b;
  const Region dw_region{"dw", dw.data, one_row(filters), size_of(dw.dtype)};
  const Region dgates_region{"dgates", dgates.data, one_row(dgates.given() ? c.layout.blocks : 0), size_of(sums)};
  const bool exchanged = c.layout.transposed;
  const Region read[] = {{"w", w.values.data, one_row(filters), size_of(g.dtype)},
                         {"gates", w.gates.data, one_row(c.layout.blocks), size_of(sums)},
                         region_of_images(exchanged ? c.x_name : c.y_name, g.rows, g.dtype),
                         region_of_images(exchanged ? c.y_name : c.x_name, g.columns, g.dtype),
                         {"channel_order", order, one_row(x_channels(c.layout)), 4}};
  BS_RETURN_IF_ERROR(check_disjoint(c.op, dw_region, read));
  BS_RETURN_IF_ERROR(check_disjoint(c.op, dw_region, {&dgates_region, 1}));
  return check_disjoint(c.op, dgates_region, read);
}

// Shapes alone: what a workspace is asked for by. Sizes that are no call's need none.
template <class Make>
size_t size_for(const LayoutView& layout, const ConvGeometry& geometry, const ConstTensor& x, Make make) {
  const Call c{"conv", "x", "y", layout, geometry};
  if (layout.index == nullptr || !check_geometry(c.op, geometry).ok() || size_of(x.dtype) == 0) return 0;
  if (layout.blocks * taps_of(geometry) > kMostFilters || x.rank < 3 || x.rank > kMaxRank) return 0;
  ConstTensor shape = x;
  if (shape.data == nullptr) shape.data = &c;  // an address, not read
  Orders orders;
  auto images = check_images({c.op, c.x_name, shape}, x_channels(layout), geometry.rank, orders);
  if (!images.ok() || images->n == 0) return 0;
  SpatialSizes size = {};
  const auto unused = static_cast<size_t>(kMaxSizes - geometry.rank);
  std::copy(images->size.begin() + static_cast<std::ptrdiff_t>(unused), images->size.end(), size.begin());
  const auto needed = output_size(c.op, geometry, size);
  if (!needed.ok()) return 0;
  set_order(*images, orders);
  images->data = nullptr;
  Pair pair{*images, *images};
  pair.y.channels = y_channels(layout);
  for (size_t i = 0; i < static_cast<size_t>(geometry.rank); ++i) pair.y.size[unused + i] = (*needed)[i];
  return workspace_size(make(pair), x.device, x_channels(layout));
}

}  // namespace

Status conv_fprop(const LayoutView& layout, const ConvGeometry& geometry, ConstTensor x, const Weights& w,
                  const int32_t* channel_order, const Epilogue& epilogue, Tensor y, Workspace workspace,
                  Stream stream) {
  return run_product({"conv_fprop", "x", "y", layout, geometry}, Pass::fprop, {x, w, channel_order, epilogue, y},
                     workspace, stream);
}

Status conv_dgrad(const LayoutView& layout, const ConvGeometry& geometry, ConstTensor dy, const Weights& w,
                  const int32_t* channel_order, Tensor dx, Workspace workspace, Stream stream) {
  return run_product({"conv_dgrad", "dx", "dy", layout, geometry}, Pass::dgrad, {dy, w, channel_order, {}, dx},
                     workspace, stream);
}

Status conv_wgrad(const LayoutView& layout, const ConvGeometry& geometry, ConstTensor x, ConstTensor dy,
                  const Weights& w, const int32_t* channel_order, Accumulate accumulate, const WeightGrads& grads,
                  Workspace workspace, Stream stream) {
  const Call c{"conv_wgrad", "x", "dy", layout, geometry};
  BS_RETURN_IF_ERROR(check_setting(c, x.device));
  Orders orders;
  const auto pair = check_pair(c, x, dy, orders);
  if (!pair.ok()) return pair.status();
  if (!grads.values.given()) return invalid("[", c.op, "] dw is not given");
  WeightGradient g = gradient_of(layout, geometry, *pair, x.dtype);
  set_order(g.rows, orders);
  set_order(g.columns, orders);
  BS_RETURN_IF_ERROR(check_gradients(c, g, w, channel_order, grads, x.device));
  BS_RETURN_IF_ERROR(check_stream(c.op, stream));
  if (layout.blocks == 0) return {};
  (layout.transposed ? g.row_channels : g.column_channels) = channel_order;
  if (pair->x.n > 0) {
    BS_RETURN_IF_ERROR(check_workspace(c.op, workspace, workspace_size(g, x.device, x_channels(layout)), x.device));
    BS_RETURN_IF_ERROR(check_order(c, channel_order, x.device, workspace.data));
  }
  g.dw_dtype = grads.values.dtype;
  g.w = w.values.data;
  g.gates = w.gates.data;
  g.dw = grads.values.data;
  g.dgates = grads.gates.data;
  g.accumulate = accumulate == Accumulate::yes;
  if (x.device.type == DeviceType::cuda) return cuda_weight_gradient(g, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_weight_gradient(g, *isa, workspace, threads_for(stream.threads));
}

size_t conv_fprop_workspace_size(const LayoutView& layout, const ConvGeometry& geometry, const ConstTensor& x,
                                 const int32_t* channel_order) {
  return size_for(layout, geometry, x, [&](const Pair& pair) {
    Product p = product_of(layout, geometry, Pass::fprop, pair, x.dtype);
    p.x_channels = channel_order;
    return p;
  });
}
size_t conv_dgrad_workspace_size(const LayoutView& layout, const ConvGeometry& geometry, const ConstTensor& x,
                                 const int32_t* channel_order) {
  return size_for(layout, geometry, x, [&](const Pair& pair) {
    Product p = product_of(layout, geometry, Pass::dgrad, pair, x.dtype);
    p.y_channels = channel_order;
    return p;
  });
}
size_t conv_wgrad_workspace_size(const LayoutView& layout, const ConvGeometry& geometry, const ConstTensor& x,
                                 const int32_t* channel_order) {
  return size_for(layout, geometry, x, [&](const Pair& pair) {
    WeightGradient g = gradient_of(layout, geometry, pair, x.dtype);
    (layout.transposed ? g.row_channels : g.column_channels) = channel_order;
    return g;
  });
}

}  // namespace blocksparse
