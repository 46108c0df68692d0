// The edge of the convolution: it checks a call once, then hands it to a device.
#include "ops/conv/conv.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "ops/conv/geometry.h"

namespace blocksparse {

using namespace conv;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int64_t kMostFilters = int64_t{1} << 40;  // blocks * taps: more do not fit into any memory

// What every call has: its name, the caller's names of the tensors with the sizes of x and y, and the convolution.
struct Call {
  const char *op, *x_name, *y_name;
  const Convolution& conv;
};

int64_t taps_of(const ConvGeometry& g) { return gather_of(g, false).taps(); }

Region region_of_images(const char* name, const Images& a, DType dtype) {
  return {name, a.data, one_row(a.n * a.image_stride()), size_of(dtype)};
}

// Null means that channel c is channel c.
const int32_t* order_of(const Convolution& conv) {
  return conv.channel_order.empty() ? nullptr : conv.channel_order.data();
}

Region region_of_order(const Convolution& conv) {
  const auto channels = static_cast<int64_t>(conv.channel_order.size());
  return {"channel_order", order_of(conv), one_row(channels), sizeof(int32_t)};
}

// Checks the convolution by itself. check_order() checks the entries of its order of channels.
Status check_convolution(const Call& c) {
  const LayoutView& layout = c.conv.layout;
  BS_RETURN_IF_ERROR(check_geometry(c.op, c.conv.geometry));
  const int64_t taps = taps_of(c.conv.geometry);
  if (layout.blocks * taps > kMostFilters) {
    return invalid("[", c.op, "] ", layout.blocks, " blocks of ", taps, " taps are too many");
  }
  const auto entries = static_cast<int64_t>(c.conv.channel_order.size());
  if (entries == 0 || entries == layout.inputs()) return {};
  return invalid("[", c.op, "] channel_order is [", entries, "], needs [", layout.inputs(), "], the channels of ",
                 c.x_name);
}

Status check_setting(const Call& c, Device device) {
  BS_RETURN_IF_ERROR(check_device_type(c.op, device));
  if (device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (c.conv.layout.index == nullptr) return invalid("[", c.op, "] layout is null");
  if (c.conv.layout.device != device) {
    return invalid("[", c.op, "] the layout's tables are not on the device of ", c.x_name,
                   "; copy Layout::index() there");
  }
  return check_convolution(c);
}

// x and y, or their gradients: each is checked, and both have one order and sizes that belong together.
struct Pair {
  Images x, y;
};
Result<Pair> check_pair(const Call& c, const ConstTensor& x, const ConstTensor& y, Orders& orders) {
  const Named named_x{c.op, c.x_name, x}, named_y{c.op, c.y_name, y};
  const int32_t rank = c.conv.geometry.rank;
  auto checked_x = check_images(named_x, c.conv.layout.inputs(), rank, orders);
  if (!checked_x.ok()) return checked_x.status();
  auto checked_y = check_images(named_y, c.conv.layout.outputs(), rank, orders);
  if (!checked_y.ok()) return checked_y.status();
  BS_RETURN_IF_ERROR(check_dtype(named_y, x.dtype));
  BS_RETURN_IF_ERROR(check_device(named_y, x.device));
  SpatialSizes size = {};
  for (int32_t i = 0; i < rank; ++i) size[static_cast<size_t>(i)] = x.shape[static_cast<size_t>(i) + 2];
  const auto needed = output_size(c.op, c.conv.geometry, size);
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
  const int64_t b = c.conv.layout.block_size;
  if (w.values.given()) {
    const Named values{c.op, "w", w.values};
    BS_RETURN_IF_ERROR(check_contiguous(values, {c.conv.layout.blocks, taps_of(c.conv.geometry), b, b}));
    BS_RETURN_IF_ERROR(check_dtype(values, dtype));
    BS_RETURN_IF_ERROR(check_device(values, device));
  }
  if (w.gates.given()) {
    const Named gates{c.op, "gates", w.gates};
    BS_RETURN_IF_ERROR(check_contiguous(gates, {c.conv.layout.blocks}));
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
    const auto checked = check_images(named, of_y.channels, c.conv.geometry.rank, orders);
    if (!checked.ok()) return checked.status();
    BS_RETURN_IF_ERROR(check_dtype(named, y.dtype));
    BS_RETURN_IF_ERROR(check_device(named, y.device));
    residual = *checked;
    if (residual.n != of_y.n || residual.size != of_y.size) {
      return invalid("[", c.op, "] residual is ", shape_text(epilogue.residual), ", needs the shape of ", c.y_name,
                     ", ", shape_text(y));
    }
  }
  if (epilogue.activation < Activation::none || epilogue.activation > Activation::gelu_tanh) {
    return invalid("[", c.op, "] activation is ", static_cast<int32_t>(epilogue.activation),
                   ", needs 0 (none), 1 (relu), 2 (gelu), 3 (silu) or 4 (gelu_tanh)");
  }
  return {};
}

// Checks on a CPU that the order is a permutation of the channels of x. `seen` has room for a byte a channel.
Status check_order(const Call& c, Device device, void* seen) {
  const std::span<const int32_t> order = c.conv.channel_order;
  if (order.empty() || device.type != DeviceType::cpu) return {};
  const auto channels = static_cast<int64_t>(order.size());
  auto* marks = static_cast<char*>(seen);
  std::memset(marks, 0, order.size());
  for (int64_t i = 0; i < channels; ++i) {
    const int64_t channel = order[static_cast<size_t>(i)];
    if (channel < 0 || channel >= channels) {
      return invalid("[", c.op, "] channel_order[", i, "] is ", channel, ", needs 0 to ", channels - 1);
    }
    if (marks[channel] != 0) return invalid("[", c.op, "] channel_order holds channel ", channel, " twice");
    marks[channel] = 1;
  }
  return {};
}

Product product_of(const Convolution& conv, Pass pass, const Pair& pair, DType dtype) {
  const bool backward = pass == Pass::dgrad;
  Product p{.dtype = dtype,
            .layout = conv.layout,
            .by_in = conv.layout.transposed != backward,
            .gather = gather_of(conv.geometry, conv.geometry.transposed != backward),
            .x = backward ? pair.y : pair.x,
            .y = backward ? pair.x : pair.y};
  (backward ? p.y_channels : p.x_channels) = order_of(conv);
  return p;
}

WeightGradient gradient_of(const Convolution& conv, const Pair& pair, DType dtype) {
  const bool exchanged = conv.layout.transposed;
  LayoutView plain = conv.layout;
  plain.transposed = false;
  // x is gathered, and by a transposed convolution dy. The rows are those of the layout as it is stored.
  WeightGradient g{.dtype = dtype,
                   .layout = plain,
                   .gather = gather_of(conv.geometry, false),
                   .gathers_rows = conv.geometry.transposed != exchanged,
                   .rows = exchanged ? pair.x : pair.y,
                   .columns = exchanged ? pair.y : pair.x};
  (exchanged ? g.row_channels : g.column_channels) = order_of(conv);
  return g;
}

void set_order(Images& a, const Orders& orders) { a.channels_last = orders.channels_last; }

template <class Problem>
size_t workspace_size(const Problem& problem, Device device, int64_t channels) {
  if (device.type == DeviceType::cuda) return cuda_workspace_size(problem);
  return std::max(cpu_workspace_size(problem), static_cast<size_t>(channels));  // check_order() needs a byte a channel
}

struct Tensors {
  const ConstTensor& x;  // what is read
  const Weights& w;
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
  Product p = product_of(c.conv, pass, *pair, dtype);
  BS_RETURN_IF_ERROR(check_epilogue(c, t.epilogue, written, p.y, orders, p.residual));
  for (Images* a : {&p.x, &p.y, &p.residual}) set_order(*a, orders);
  p.w = t.w.values.data;
  p.gates = t.w.gates.data;
  p.bias = t.epilogue.bias.data;
  p.activation = t.epilogue.activation;
  const LayoutView& layout = c.conv.layout;
  const int64_t area = int64_t{layout.block_size} * layout.block_size, size = size_of(dtype);
  const Region read[] = {region_of_images(backward ? c.y_name : c.x_name, p.x, dtype),
                         {"w", p.w, one_row(layout.blocks * p.gather.taps() * area), size},
                         {"gates", p.gates, one_row(layout.blocks), size_of(sum_dtype(dtype))},
                         {"bias", p.bias, one_row(p.y.channels), size},
                         region_of_images("residual", p.residual, dtype),
                         region_of_order(c.conv)};
  BS_RETURN_IF_ERROR(check_disjoint(c.op, region_of_images(backward ? c.x_name : c.y_name, p.y, dtype), read));
  BS_RETURN_IF_ERROR(check_stream(c.op, stream));
  if (p.y.n == 0 || p.y.channels == 0) return {};
  BS_RETURN_IF_ERROR(check_workspace(c.op, workspace, workspace_size(p, device, layout.inputs()), device));
  BS_RETURN_IF_ERROR(check_order(c, device, workspace.data));
  if (device.type == DeviceType::cuda) return cuda_product(p, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_product(p, *isa, workspace, threads_for(stream.threads));
}

// Checks dW and the gates' gradient, and that they lie apart from each other and from what is read.
Status check_gradients(const Call& c, const WeightGradient& g, const Weights& w, const WeightGrads& grads,
                       Device device) {
  const int64_t b = g.layout.block_size, blocks = g.layout.blocks, taps = g.gather.taps();
  const ConstTensor dw = grads.values, dgates = grads.gates;
  const DType sums = sum_dtype(g.dtype);
  BS_RETURN_IF_ERROR(check_contiguous({c.op, "dw", dw}, {blocks, taps, b, b}));
  BS_RETURN_IF_ERROR(check_device({c.op, "dw", dw}, device));
  BS_RETURN_IF_ERROR(check_gradient_dtype({c.op, "dw", dw}, g.dtype));
  BS_RETURN_IF_ERROR(check_weights(c, w, g.dtype, device));
  if (dgates.given()) {
    const Named named{c.op, "dgates", dgates};
    BS_RETURN_IF_ERROR(check_contiguous(named, {blocks}));
    BS_RETURN_IF_ERROR(check_dtype(named, sums));
    BS_RETURN_IF_ERROR(check_device(named, device));
    if (!w.values.given()) return invalid("[", c.op, "] dgates needs w, which is not given");
  }
  const int64_t filters = blocks * taps * b * b;
  const Region dw_region{"dw", dw.data, one_row(filters), size_of(dw.dtype)};
  const Region dgates_region{"dgates", dgates.data, one_row(dgates.given() ? blocks : 0), size_of(sums)};
  const bool exchanged = c.conv.layout.transposed;
  const Region read[] = {{"w", w.values.data, one_row(filters), size_of(g.dtype)},
                         {"gates", w.gates.data, one_row(blocks), size_of(sums)},
                         region_of_images(exchanged ? c.x_name : c.y_name, g.rows, g.dtype),
                         region_of_images(exchanged ? c.y_name : c.x_name, g.columns, g.dtype),
                         region_of_order(c.conv)};
  BS_RETURN_IF_ERROR(check_disjoint(c.op, dw_region, read));
  BS_RETURN_IF_ERROR(check_disjoint(c.op, dw_region, {&dgates_region, 1}));
  return check_disjoint(c.op, dgates_region, read);
}

// The images of a problem, or nothing if the op would refuse it.
std::optional<Pair> images_of(const ConvProblem& p, Device device) {
  const Call c{"conv", "x", "y", p.conv};
  const LayoutView& layout = p.conv.layout;
  if (!has_tables_on(layout, device) || size_of(p.dtype) == 0 || p.n < 0 || !check_convolution(c).ok()) return {};
  const auto y_size = output_size(c.op, p.conv.geometry, p.size);
  if (!y_size.ok()) return {};
  double most = 0;  // elements, as a double, which cannot overflow
  const auto images = [&](int64_t channels, const SpatialSizes& size) {
    Images a{.n = p.n, .channels = channels, .channels_last = p.channels_last};
    std::copy_n(size.begin(), p.conv.geometry.rank, a.size.end() - p.conv.geometry.rank);
    double elements = static_cast<double>(a.n) * static_cast<double>(a.channels);
    for (const int64_t of_axis : a.size) elements *= static_cast<double>(of_axis);
    most = std::max(most, elements);
    return a;
  };
  const Pair pair{images(layout.inputs(), p.size), images(layout.outputs(), *y_size)};
  return most < 0x1p58 ? std::optional(pair) : std::nullopt;
}

template <class Make>
size_t size_for(const ConvProblem& p, Device device, Make make) {
  const auto pair = images_of(p, device);
  return pair && p.n > 0 ? workspace_size(make(*pair), device, p.conv.layout.inputs()) : 0;
}

}  // namespace

namespace conv {

size_t workspace_size_like(const Convolution& conv, const ConstTensor& x, WorkspaceSize* size) {
  const int32_t rank = conv.geometry.rank;
  if (rank < 1 || rank > kMaxSizes || x.rank != rank + 2) return 0;
  ConstTensor shape = x;
  if (shape.data == nullptr) shape.data = &conv;  // any address: it is not read
  Orders orders;
  const auto images = check_images({"conv", "x", shape}, conv.layout.inputs(), rank, orders);
  if (!images.ok()) return 0;
  ConvProblem problem{.conv = conv, .dtype = x.dtype, .n = images->n, .channels_last = orders.channels_last};
  std::copy_n(images->size.end() - rank, rank, problem.size.begin());
  return size(problem, x.device);
}

}  // namespace conv

Status conv_fprop(const Convolution& conv, ConstTensor x, const Weights& w, const Epilogue& epilogue, Tensor y,
                  Workspace workspace, Stream stream) {
  return run_product({"conv_fprop", "x", "y", conv}, Pass::fprop, {x, w, epilogue, y}, workspace, stream);
}

Status conv_dgrad(const Convolution& conv, ConstTensor dy, const Weights& w, Tensor dx, Workspace workspace,
                  Stream stream) {
  return run_product({"conv_dgrad", "dx", "dy", conv}, Pass::dgrad, {dy, w, {}, dx}, workspace, stream);
}

Status conv_wgrad(const Convolution& conv, ConstTensor x, ConstTensor dy, const Weights& w, Accumulate accumulate,
                  const WeightGrads& grads, Workspace workspace, Stream stream) {
  const Call c{"conv_wgrad", "x", "dy", conv};
  BS_RETURN_IF_ERROR(check_setting(c, x.device));
  Orders orders;
  const auto pair = check_pair(c, x, dy, orders);
  if (!pair.ok()) return pair.status();
  if (!grads.values.given()) return invalid("[", c.op, "] dw is not given");
  WeightGradient g = gradient_of(conv, *pair, x.dtype);
  set_order(g.rows, orders);
  set_order(g.columns, orders);
  BS_RETURN_IF_ERROR(check_gradients(c, g, w, grads, x.device));
  BS_RETURN_IF_ERROR(check_stream(c.op, stream));
  if (g.layout.blocks == 0) return {};
  if (pair->x.n > 0) {
    const size_t needed = workspace_size(g, x.device, conv.layout.inputs());
    BS_RETURN_IF_ERROR(check_workspace(c.op, workspace, needed, x.device));
    BS_RETURN_IF_ERROR(check_order(c, x.device, workspace.data));
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

size_t conv_fprop_workspace_size(const ConvProblem& problem, Device device) {
  return size_for(problem, device,
                  [&](const Pair& pair) { return product_of(problem.conv, Pass::fprop, pair, problem.dtype); });
}
size_t conv_dgrad_workspace_size(const ConvProblem& problem, Device device) {
  return size_for(problem, device,
                  [&](const Pair& pair) { return product_of(problem.conv, Pass::dgrad, pair, problem.dtype); });
}
size_t conv_wgrad_workspace_size(const ConvProblem& problem, Device device) {
  return size_for(problem, device, [&](const Pair& pair) { return gradient_of(problem.conv, pair, problem.dtype); });
}

}  // namespace blocksparse
