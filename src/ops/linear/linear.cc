// The edge of the linear op: checks once, then hands on to a device.
#include "ops/linear/linear.h"

#include <array>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "ops/linear/select.h"

namespace blocksparse {

using namespace linear;  // NOLINT(google-build-using-namespace)

namespace linear {

std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::fprop: return "fprop";
    case Pass::dgrad: return "dgrad";
    case Pass::wgrad: return "wgrad";
  }
  return "unknown";
}

Activations flatten(const ConstTensor& tensor) {
  const auto m = check_activations({"linear", "x", tensor}, tensor.shape[static_cast<size_t>(tensor.rank) - 1], Use::read);
  return {tensor.data, m->n, m->features, m->token_stride, m->feature_stride};
}

GradTerm WeightGradient::term(size_t i) const {
  const GradPair& pair = pairs[i];
  return exchanged ? GradTerm{flatten(pair.dy), flatten(pair.x)} : GradTerm{flatten(pair.x), flatten(pair.dy)};
}

}  // namespace linear

namespace {

// A tensor that was checked, for overlap tests.
struct Region {
  const char* name;
  const void* data;
  Matrix matrix;
  int64_t size;  // of an element
};

Matrix one_row(int64_t elements) { return {1, elements, elements, 1}; }

Status check_disjoint(const char* op, const Region& out, std::initializer_list<Region> inputs) {
  for (const Region& in : inputs) {
    if (in.data != nullptr && overlap(out.data, out.matrix, out.size, in.data, in.matrix, in.size)) {
      return invalid("[", op, "] ", out.name, " overlaps ", in.name, ", needs memory of its own");
    }
  }
  return {};
}

Status check_layout(const char* op, const LayoutView& layout, Device device) {
  if (device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (layout.index == nullptr) return invalid("[", op, "] layout is null");
  if (layout.device == device) return {};
  return invalid("[", op, "] the layout's tables are not on the device of x; copy Layout::index() there");
}

Status check_workspace(const char* op, const Workspace& workspace, size_t needed) {
  if (needed == 0 || (workspace.data != nullptr && workspace.bytes >= needed)) return {};
  return invalid("[", op, "] workspace has ", workspace.data == nullptr ? 0 : workspace.bytes, " bytes, needs ", needed);
}

Status check_weights(const char* op, const LayoutView& layout, const Weights& w, DType dtype, Device device) {
  const int64_t b = layout.block_size;
  if (w.values.given()) {
    const Named values{op, "w", w.values};
    BS_RETURN_IF_ERROR(check_contiguous(values, {layout.blocks, b, b}));
    BS_RETURN_IF_ERROR(check_dtype(values, dtype));
    BS_RETURN_IF_ERROR(check_device(values, device));
  }
  if (w.gates.given()) {
    const Named gates{op, "gates", w.gates};
    BS_RETURN_IF_ERROR(check_contiguous(gates, {layout.blocks}));
    BS_RETURN_IF_ERROR(check_dtype(gates, sum_dtype(dtype)));
    BS_RETURN_IF_ERROR(check_device(gates, device));
  }
  return {};
}

size_t workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n, Device device) {
  if (n <= 0 || layout.index == nullptr) return 0;
  if (device.type == DeviceType::cuda) return cuda_workspace_size(pass, layout, dtype, n);
  if (pass == Pass::wgrad) {
    const DType narrowest = dtype;
    return plan_gradient({.pass = pass,
                          .dtype = dtype,
                          .block = layout.block_size,
                          .n = n,
                          .inputs = layout.in_features,
                          .outputs = layout.out_features},
                         narrowest, layout.blocks)
        .workspace_bytes();
  }
  const bool by_in = layout.transposed != (pass == Pass::dgrad);
  return plan_product({.pass = pass,
                       .dtype = dtype,
                       .block = layout.block_size,
                       .n = n,
                       .inputs = by_in ? layout.out_features : layout.in_features,
                       .outputs = by_in ? layout.in_features : layout.out_features,
                       .slots = walk_of(layout, by_in).slots})
      .workspace_bytes();
}

int32_t threads_of(const Stream& stream) { return stream.threads > 0 ? stream.threads : default_threads(); }

// fprop and dgrad; the names are those of the arguments.
Status product(Pass pass, const char* op, const char* x_name, const char* y_name, const LayoutView& layout,
               ConstTensor x, const Weights& w, const Epilogue& epilogue, Tensor y, Workspace workspace, Stream stream) {
  BS_RETURN_IF_ERROR(check_layout(op, layout, x.device));
  const bool by_in = layout.transposed != (pass == Pass::dgrad);
  const int64_t inputs = by_in ? layout.out_features : layout.in_features;
  const int64_t outputs = by_in ? layout.in_features : layout.out_features;
  const auto mx = check_activations({op, x_name, x}, inputs, Use::read);
  if (!mx.ok()) return mx.status();
  if (!w.values.given()) return invalid("[", op, "] w is not given");
  BS_RETURN_IF_ERROR(check_weights(op, layout, w, x.dtype, x.device));
  const ConstTensor y_const = y;
  const Named named_y{op, y_name, y_const};
  const auto my = check_activations(named_y, outputs, Use::write);
  if (!my.ok()) return my.status();
  BS_RETURN_IF_ERROR(check_dtype(named_y, x.dtype));
  BS_RETURN_IF_ERROR(check_device(named_y, x.device));
  if (my->n != mx->n) {
    return invalid("[", op, "] ", y_name, " is ", shape_text(y), ", ", mx->n, " tokens of ", x_name, " need [", mx->n,
                   ", ", outputs, "]");
  }
  if (epilogue.bias.given()) {
    const Named bias{op, "bias", epilogue.bias};
    BS_RETURN_IF_ERROR(check_contiguous(bias, {outputs}));
    BS_RETURN_IF_ERROR(check_dtype(bias, x.dtype));
    BS_RETURN_IF_ERROR(check_device(bias, x.device));
  }
  Matrix mr{};
  if (epilogue.residual.given()) {
    const Named residual{op, "residual", epilogue.residual};
    const auto checked = check_activations(residual, outputs, Use::read);
    if (!checked.ok()) return checked.status();
    mr = *checked;
    BS_RETURN_IF_ERROR(check_dtype(residual, x.dtype));
    BS_RETURN_IF_ERROR(check_device(residual, x.device));
    if (mr.n != mx->n) {
      return invalid("[", op, "] residual is ", shape_text(epilogue.residual), ", needs the shape of ", y_name, ", ",
                     shape_text(y));
    }
  }
  if (epilogue.activation < Activation::none || epilogue.activation > Activation::silu) {
    return invalid("[", op, "] activation is ", static_cast<int32_t>(epilogue.activation),
                   ", needs 0 (none), 1 (relu), 2 (gelu) or 3 (silu)");
  }
  if (stream.threads < 0) return invalid("[", op, "] threads is ", stream.threads, ", needs 0 or more");
  const int64_t size = size_of(x.dtype);
  BS_RETURN_IF_ERROR(check_disjoint(
      op, {y_name, y.data, *my, size},
      {{x_name, x.data, *mx, size},
       {"w", w.values.data, one_row(layout.blocks * layout.block_size * layout.block_size), size},
       {"gates", w.gates.data, one_row(layout.blocks), size_of(sum_dtype(x.dtype))},
       {"bias", epilogue.bias.data, one_row(outputs), size},
       {"residual", epilogue.residual.data, mr, size}}));
  if (mx->n == 0 || outputs == 0) return {};
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, workspace_size(pass, layout, x.dtype, mx->n, x.device)));

  auto activations = [](const void* data, const Matrix& m) {
    return Activations{data, m.n, m.features, m.token_stride, m.feature_stride};
  };
  const Product p{.dtype = x.dtype,
                  .layout = layout,
                  .by_in = by_in,
                  .x = activations(x.data, *mx),
                  .y = activations(y.data, *my),
                  .residual = activations(epilogue.residual.data, mr),
                  .w = w.values.data,
                  .gates = w.gates.data,
                  .bias = epilogue.bias.data,
                  .activation = epilogue.activation};
  if (x.device.type == DeviceType::cuda) return cuda_product(p, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_product(p, *isa, workspace, threads_of(stream));
}

}  // namespace

Status linear_fprop(const LayoutView& layout, ConstTensor x, const Weights& w, const Epilogue& epilogue, Tensor y,
                    Workspace workspace, Stream stream) {
  return product(Pass::fprop, "linear_fprop", "x", "y", layout, x, w, epilogue, y, workspace, stream);
}

Status linear_dgrad(const LayoutView& layout, ConstTensor dy, const Weights& w, Tensor dx, Workspace workspace,
                    Stream stream) {
  return product(Pass::dgrad, "linear_dgrad", "dy", "dx", layout, dy, w, {}, dx, workspace, stream);
}

Status linear_wgrad(const LayoutView& layout, std::span<const GradPair> pairs, const Weights& w, Accumulate accumulate,
                    const WeightGrads& grads, Workspace workspace, Stream stream) {
  const char* op = "linear_wgrad";
  const int64_t b = layout.block_size;
  const ConstTensor dw = grads.values, dgates = grads.gates;
  if (!dw.given()) return invalid("[", op, "] dw is not given");
  const DType dtype = !pairs.empty() ? pairs[0].x.dtype : w.values.given() ? w.values.dtype : dw.dtype;
  const Device device = dw.device;
  BS_RETURN_IF_ERROR(check_layout(op, layout, device));
  const Named named_dw{op, "dw", dw};
  BS_RETURN_IF_ERROR(check_contiguous(named_dw, {layout.blocks, b, b}));
  if (dw.dtype != dtype && dw.dtype != sum_dtype(dtype)) {
    return invalid("[", op, "] dw is ", name_of(dw.dtype), ", needs ", name_of(sum_dtype(dtype)), " or ",
                   name_of(dtype));
  }
  BS_RETURN_IF_ERROR(check_weights(op, layout, w, dtype, device));
  if (dgates.given()) {
    const Named named{op, "dgates", dgates};
    BS_RETURN_IF_ERROR(check_contiguous(named, {layout.blocks}));
    BS_RETURN_IF_ERROR(check_dtype(named, sum_dtype(dtype)));
    BS_RETURN_IF_ERROR(check_device(named, device));
    if (!w.values.given()) return invalid("[", op, "] dgates needs w, which is not given");
  }
  if (stream.threads < 0) return invalid("[", op, "] threads is ", stream.threads, ", needs 0 or more");

  const int64_t in = layout.transposed ? layout.out_features : layout.in_features;
  const int64_t out = layout.transposed ? layout.in_features : layout.out_features;
  const Region dw_region{"dw", dw.data, one_row(layout.blocks * b * b), size_of(dw.dtype)};
  const Region dgates_region{"dgates", dgates.data, one_row(dgates.given() ? layout.blocks : 0),
                             size_of(sum_dtype(dtype))};
  const Region w_region{"w", w.values.data, one_row(layout.blocks * b * b), size_of(dtype)};
  const Region gates_region{"gates", w.gates.data, one_row(layout.blocks), size_of(sum_dtype(dtype))};
  BS_RETURN_IF_ERROR(check_disjoint(op, dw_region, {w_region, gates_region, dgates_region}));
  BS_RETURN_IF_ERROR(check_disjoint(op, dgates_region, {w_region, gates_region}));
  int64_t n = 0;
  for (const GradPair& pair : pairs) {
    const Named x{op, "x", pair.x}, dy{op, "dy", pair.dy};
    const auto mx = check_activations(x, in, Use::read), my = check_activations(dy, out, Use::read);
    if (!mx.ok()) return mx.status();
    if (!my.ok()) return my.status();
    if (mx->n != my->n) {
      return invalid("[", op, "] x is ", shape_text(pair.x), " and dy ", shape_text(pair.dy),
                     ", both need the same number of tokens");
    }
    for (const Named& t : {x, dy}) {
      BS_RETURN_IF_ERROR(check_dtype(t, dtype));
      BS_RETURN_IF_ERROR(check_device(t, device));
    }
    for (const Region& written : {dw_region, dgates_region}) {
      if (written.data == nullptr) continue;
      BS_RETURN_IF_ERROR(check_disjoint(op, written, {{"x", pair.x.data, *mx, size_of(dtype)},
                                                      {"dy", pair.dy.data, *my, size_of(dtype)}}));
    }
    n += mx->n;
  }
  if (layout.blocks == 0) return {};
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, workspace_size(Pass::wgrad, layout, dtype, n, device)));

  LayoutView plain = layout;
  plain.transposed = false;
  const WeightGradient g{.dtype = dtype,
                         .dw_dtype = dw.dtype,
                         .layout = plain,
                         .pairs = pairs,
                         .w = w.values.data,
                         .gates = w.gates.data,
                         .dw = grads.values.data,
                         .dgates = grads.gates.data,
                         .accumulate = accumulate == Accumulate::yes,
                         .exchanged = layout.transposed};
  if (device.type == DeviceType::cuda) return cuda_weight_gradient(g, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_weight_gradient(g, *isa, workspace, threads_of(stream));
}

size_t linear_fprop_workspace_size(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  return workspace_size(Pass::fprop, layout, dtype, n, device);
}
size_t linear_dgrad_workspace_size(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  return workspace_size(Pass::dgrad, layout, dtype, n, device);
}
size_t linear_wgrad_workspace_size(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  return workspace_size(Pass::wgrad, layout, dtype, n, device);
}

}  // namespace blocksparse
