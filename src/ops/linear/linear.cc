// The edge of the linear op: it checks a call once, then hands it to a device.
#include <algorithm>

#include "blocksparse/blocksparse.h"
#include "core/ceil_div.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "gemm/product.h"
#include "ops/glu/glu.h"

namespace blocksparse {

using namespace gemm;  // NOLINT(google-build-using-namespace)

namespace {

Status check_layout(const char* op, const LayoutView& layout, Device device) {
  BS_RETURN_IF_ERROR(check_device_type(op, device));
  if (device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (layout.index == nullptr) return invalid("[", op, "] layout is null");
  if (layout.device == device) return {};
  return invalid("[", op, "] the layout's tables are not on the device of x; copy Layout::index() there");
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

// The arguments of fprop or dgrad; `x_name` and `y_name` are what the caller calls them.
struct ProductCall {
  Pass pass;
  const char *op, *x_name, *y_name;
  const LayoutView& layout;
  const ConstTensor& x;
  const Weights& w;
  const Epilogue& epilogue;
  const Tensor& y;
  bool glu = false;  // y = f(gate) * up, half as wide
};

// Returns the features of y.
Result<int64_t> check_width(const ProductCall& c, int64_t outputs) {
  if (!c.glu) return outputs;
  const ConstTensor y = c.y;
  const int64_t hidden = y.rank > 0 ? y.shape[static_cast<size_t>(y.rank) - 1] : 0;
  if (hidden < 1 || hidden > outputs || interleaved_features(hidden) != outputs) {
    return invalid("[", c.op, "] y is ", shape_text(y), ", but the layout's ", outputs,
                   " outputs are no gate and up of ", hidden, " hidden features");
  }
  if (c.epilogue.residual.given()) return invalid("[", c.op, "] residual is given, needs none");
  return hidden;
}

Status check_epilogue(const ProductCall& c, int64_t n, int64_t outputs, Matrix& residual_matrix) {
  if (c.epilogue.bias.given()) {
    const Named bias{c.op, "bias", c.epilogue.bias};
    BS_RETURN_IF_ERROR(check_contiguous(bias, {outputs}));
    BS_RETURN_IF_ERROR(check_dtype(bias, c.x.dtype));
    BS_RETURN_IF_ERROR(check_device(bias, c.x.device));
  }
  if (c.epilogue.residual.given()) {
    const Named residual{c.op, "residual", c.epilogue.residual};
    const auto checked = check_activations(residual, outputs, Use::read);
    if (!checked.ok()) return checked.status();
    residual_matrix = *checked;
    BS_RETURN_IF_ERROR(check_dtype(residual, c.x.dtype));
    BS_RETURN_IF_ERROR(check_device(residual, c.x.device));
    if (residual_matrix.n != n) {
      return invalid("[", c.op, "] residual is ", shape_text(c.epilogue.residual), ", needs the shape of ", c.y_name,
                     ", ", shape_text(c.y));
    }
  }
  if (c.epilogue.activation < Activation::none || c.epilogue.activation > Activation::gelu_tanh) {
    return invalid("[", c.op, "] activation is ", static_cast<int32_t>(c.epilogue.activation),
                   ", needs 0 (none), 1 (relu), 2 (gelu), 3 (silu) or 4 (gelu_tanh)");
  }
  return {};
}

Result<Product> check_product(const ProductCall& c) {
  const LayoutView& layout = c.layout;
  const DType dtype = c.x.dtype;
  BS_RETURN_IF_ERROR(check_layout(c.op, layout, c.x.device));
  const bool by_in = layout.transposed != (c.pass == Pass::dgrad);
  const int64_t inputs = by_in ? layout.out_features : layout.in_features;
  const int64_t outputs = by_in ? layout.in_features : layout.out_features;
  const auto mx = check_activations({c.op, c.x_name, c.x}, inputs, Use::read);
  if (!mx.ok()) return mx.status();
  if (!c.w.values.given()) return invalid("[", c.op, "] w is not given");
  BS_RETURN_IF_ERROR(check_weights(c.op, layout, c.w, dtype, c.x.device));
  const ConstTensor y = c.y;
  const Named named_y{c.op, c.y_name, y};
  const auto width = check_width(c, outputs);
  if (!width.ok()) return width.status();
  const auto my = check_activations(named_y, *width, Use::write);
  if (!my.ok()) return my.status();
  if (c.glu && my->feature_stride != 1 && *width > 1) {
    return invalid("[", c.op, "] y has strides ", strides_text(y), ", needs features side by side");
  }
  BS_RETURN_IF_ERROR(check_dtype(named_y, dtype));
  BS_RETURN_IF_ERROR(check_device(named_y, c.x.device));
  if (my->n != mx->n) {
    return invalid("[", c.op, "] ", c.y_name, " is ", shape_text(y), ", ", mx->n, " tokens of ", c.x_name, " need [",
                   mx->n, ", ", *width, "]");
  }
  Matrix mr{};
  BS_RETURN_IF_ERROR(check_epilogue(c, mx->n, outputs, mr));
  const int64_t size = size_of(dtype), area = int64_t{layout.block_size} * layout.block_size;
  const Region read[] = {{c.x_name, c.x.data, *mx, size},
                         {"w", c.w.values.data, one_row(layout.blocks * area), size},
                         {"gates", c.w.gates.data, one_row(layout.blocks), size_of(sum_dtype(dtype))},
                         {"bias", c.epilogue.bias.data, one_row(outputs), size},
                         {"residual", c.epilogue.residual.data, mr, size}};
  BS_RETURN_IF_ERROR(check_disjoint(c.op, {c.y_name, y.data, *my, size}, read));
  auto activations = [](const void* data, const Matrix& m) {
    return Activations{data, m.n, m.features, m.token_stride, m.feature_stride};
  };
  return Product{.dtype = dtype,
                 .layout = layout,
                 .by_in = by_in,
                 .x = activations(c.x.data, *mx),
                 .y = activations(y.data, *my),
                 .residual = activations(c.epilogue.residual.data, mr),
                 .w = c.w.values.data,
                 .gates = c.w.gates.data,
                 .bias = c.epilogue.bias.data,
                 .activation = c.epilogue.activation,
                 .glu = c.glu};
}

Status dispatch(const Product& p, Device device, Workspace workspace, Stream stream) {
  if (device.type == DeviceType::cuda) return cuda_product(p, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_product(p, *isa, workspace, threads_for(stream.threads));
}

// Bytes of z, if a gated linear unit's product goes through the workspace; 0 if product and unit are one launch.
int64_t bytes_of_z(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  return fuses_glu(layout, dtype, n, device) ? 0 : round_up(n * layout.outputs() * size_of(dtype), int64_t{256});
}

size_t glu_size(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  constexpr int64_t kMostTokens = int64_t{1} << 40;  // more do not fit into any memory
  n = std::clamp<int64_t>(n, 0, kMostTokens / std::max<int64_t>(1, layout.outputs()));
  if (fuses_glu(layout, dtype, n, device)) return glu_workspace_size(layout, dtype, n, device);
  const auto of_z = static_cast<size_t>(bytes_of_z(layout, dtype, n, device));
  return of_z + workspace_size(Pass::fprop, layout, dtype, n, device);
}

// Computes z by the product, then y of z.
Status run_glu(const Product& p, Device device, Workspace workspace, Stream stream) {
  const auto bytes = static_cast<size_t>(bytes_of_z(p.layout, p.dtype, p.x.n, device));
  if (bytes == 0) return dispatch(p, device, workspace, stream);
  Product product = p;
  product.glu = false;
  product.activation = Activation::none;
  product.y = {workspace.data, p.x.n, p.outputs(), p.outputs(), 1};
  const Workspace rest{static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
  BS_RETURN_IF_ERROR(dispatch(product, device, rest, stream));
  return glu::forward({.dtype = p.dtype,
                       .activation = p.activation,
                       .n = p.x.n,
                       .hidden = p.y.features,
                       .z = workspace.data,
                       .y = const_cast<void*>(p.y.data),
                       .z_token = p.outputs(),
                       .y_token = p.y.token_stride},
                      device, stream);
}

Status run_product(const ProductCall& c, Workspace workspace, Stream stream) {
  const auto p = check_product(c);
  if (!p.ok()) return p.status();
  BS_RETURN_IF_ERROR(check_stream(c.op, stream));
  if (p->x.n == 0 || p->y.features == 0) return {};
  const Device device = c.x.device;
  const size_t needed =
      c.glu ? glu_size(c.layout, p->dtype, p->x.n, device) : workspace_size(c.pass, c.layout, p->dtype, p->x.n, device);
  BS_RETURN_IF_ERROR(check_workspace(c.op, workspace, needed, device));
  return c.glu ? run_glu(*p, device, workspace, stream) : dispatch(*p, device, workspace, stream);
}

// Checks the (x, dy) of wgrad, and returns the tokens of all of them together.
Result<int64_t> check_pairs(const char* op, std::span<const GradPair> pairs, const LayoutView& layout, DType dtype,
                            Device device, std::initializer_list<Region> written) {
  int64_t n = 0;
  for (const GradPair& pair : pairs) {
    const Named x{op, "x", pair.x}, dy{op, "dy", pair.dy};
    const auto mx = check_activations(x, layout.inputs(), Use::read),
               my = check_activations(dy, layout.outputs(), Use::read);
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
    for (const Region& region : written) {
      const Region read[] = {{"x", pair.x.data, *mx, size_of(dtype)}, {"dy", pair.dy.data, *my, size_of(dtype)}};
      BS_RETURN_IF_ERROR(check_disjoint(op, region, read));
    }
    n += mx->n;
  }
  return n;
}

// Checks dW and the gates' gradient, and that they lie apart from each other and from what is read.
Status check_gradients(const char* op, const LayoutView& layout, const Weights& w, const WeightGrads& grads,
                       DType dtype, const Region& dw_region, const Region& dgates_region) {
  const int64_t b = layout.block_size;
  const ConstTensor dw = grads.values, dgates = grads.gates;
  BS_RETURN_IF_ERROR(check_contiguous({op, "dw", dw}, {layout.blocks, b, b}));
  BS_RETURN_IF_ERROR(check_gradient_dtype({op, "dw", dw}, dtype));
  BS_RETURN_IF_ERROR(check_weights(op, layout, w, dtype, dw.device));
  if (dgates.given()) {
    const Named named{op, "dgates", dgates};
    BS_RETURN_IF_ERROR(check_contiguous(named, {layout.blocks}));
    BS_RETURN_IF_ERROR(check_dtype(named, sum_dtype(dtype)));
    BS_RETURN_IF_ERROR(check_device(named, dw.device));
    if (!w.values.given()) return invalid("[", op, "] dgates needs w, which is not given");
  }
  const Region others[] = {{"w", w.values.data, one_row(layout.blocks * b * b), size_of(dtype)},
                           {"gates", w.gates.data, one_row(layout.blocks), size_of(sum_dtype(dtype))},
                           dgates_region};
  BS_RETURN_IF_ERROR(check_disjoint(op, dw_region, others));
  return check_disjoint(op, dgates_region, std::span(others).first(2));
}

size_t size_for(Pass pass, const LinearProblem& p, Device device) {
  if (!has_tables_on(p.layout, device) || size_of(p.dtype) == 0) return 0;
  return workspace_size(pass, p.layout, p.dtype, p.n, device);
}

}  // namespace

Status linear_fprop(const LayoutView& layout, ConstTensor x, const Weights& w, const Epilogue& epilogue, Tensor y,
                    Workspace workspace, Stream stream) {
  return run_product({Pass::fprop, "linear_fprop", "x", "y", layout, x, w, epilogue, y}, workspace, stream);
}

Status linear_glu_fprop(const LayoutView& layout, ConstTensor x, const Weights& w, const Epilogue& epilogue, Tensor y,
                        Workspace workspace, Stream stream) {
  return run_product({Pass::fprop, "linear_glu_fprop", "x", "y", layout, x, w, epilogue, y, true}, workspace, stream);
}

Status linear_dgrad(const LayoutView& layout, ConstTensor dy, const Weights& w, Tensor dx, Workspace workspace,
                    Stream stream) {
  return run_product({Pass::dgrad, "linear_dgrad", "dy", "dx", layout, dy, w, {}, dx}, workspace, stream);
}

Status linear_wgrad(const LayoutView& layout, std::span<const GradPair> pairs, const Weights& w, Accumulate accumulate,
                    const WeightGrads& grads, Workspace workspace, Stream stream) {
  const char* op = "linear_wgrad";
  const Tensor &dw = grads.values, &dgates = grads.gates;
  if (!dw.given()) return invalid("[", op, "] dw is not given");
  const DType dtype = !pairs.empty() ? pairs[0].x.dtype : w.values.given() ? w.values.dtype : dw.dtype;
  const Device device = dw.device;
  BS_RETURN_IF_ERROR(check_layout(op, layout, device));
  const Region dw_region{"dw", dw.data, one_row(layout.blocks * layout.block_size * layout.block_size),
                         size_of(dw.dtype)};
  const Region dgates_region{"dgates", dgates.data, one_row(dgates.given() ? layout.blocks : 0),
                             size_of(sum_dtype(dtype))};
  BS_RETURN_IF_ERROR(check_gradients(op, layout, w, grads, dtype, dw_region, dgates_region));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  const auto n = check_pairs(op, pairs, layout, dtype, device, {dw_region, dgates_region});
  if (!n.ok()) return n.status();
  if (layout.blocks == 0) return {};
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, workspace_size(Pass::wgrad, layout, dtype, *n, device), device));

  LayoutView plain = layout;
  plain.transposed = false;
  const WeightGradient g{.dtype = dtype,
                         .dw_dtype = dw.dtype,
                         .layout = plain,
                         .pairs = pairs,
                         .w = w.values.data,
                         .gates = w.gates.data,
                         .dw = dw.data,
                         .dgates = dgates.data,
                         .accumulate = accumulate == Accumulate::yes,
                         .exchanged = layout.transposed};
  if (device.type == DeviceType::cuda) return cuda_weight_gradient(g, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_weight_gradient(g, *isa, workspace, threads_for(stream.threads));
}

size_t linear_fprop_workspace_size(const LinearProblem& problem, Device device) {
  return size_for(Pass::fprop, problem, device);
}
size_t linear_glu_fprop_workspace_size(const LinearProblem& problem, Device device) {
  if (!has_tables_on(problem.layout, device) || size_of(problem.dtype) == 0) return 0;
  return glu_size(problem.layout, problem.dtype, problem.n, device);
}
size_t linear_dgrad_workspace_size(const LinearProblem& problem, Device device) {
  return size_for(Pass::dgrad, problem, device);
}
size_t linear_wgrad_workspace_size(const LinearProblem& problem, Device device) {
  return size_for(Pass::wgrad, problem, device);
}

}  // namespace blocksparse
