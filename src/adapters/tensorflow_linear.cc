// The linear op on TensorFlow's tensors. The gradient of x is the product on the transposed layout.
#include "adapters/tensorflow_api.h"
#include "core/text.h"

namespace blocksparse::tensorflow {

namespace {

constexpr const char* kOp = "linear";

// The sizes of y: those of x with another number of features.
std::vector<int64_t> with_features(std::vector<int64_t> sizes, int64_t features, bool features_first) {
  (features_first ? sizes.front() : sizes.back()) = features;
  return sizes;
}

// y = x (gates * W)^T + bias
void product(const Attributes& attributes, Call& call) {
  const TensorHandle x = call.next_input(), values = call.next_input(), index = call.next_input();
  const TensorHandle gates = call.next_optional(attributes.gates), bias = call.next_optional(attributes.biases);
  const bool first = attributes.features_first;
  const bs_layout_view layout = layout_view(index, attributes.transposed);
  const bs_tensor xv = tokens_view(x, kOp, first), w = view(values, kOp);
  const int64_t out_features = layout.transposed != 0 ? layout.in_features : layout.out_features;
  const TensorHandle y = call.output(0, x.dtype(), with_features(x.sizes(), out_features, first));
  const bs_tensor yv = tokens_view(y, kOp, first);
  const bs_tensor g = gates.given() ? view(gates, kOp) : bs_tensor{}, b = bias.given() ? view(bias, kOp) : bs_tensor{};
  const bs_epilogue epilogue{bias.given() ? &b : nullptr, nullptr, BS_ACTIVATION_NONE};
  with_workspace(call, bs_linear_fprop_workspace_size(&layout, xv.dtype, xv.shape[0]), [&](bs_workspace workspace) {
    require(bs_linear_fprop(&layout, &xv, &w, gates.given() ? &g : nullptr, &epilogue, &yv, workspace, stream()));
  });
}

// dW = gates * S and dgates = <S, W> for each block, with S = dy_out^T x_in
void weight_gradient(const Attributes& attributes, Call& call) {
  const TensorHandle x = call.next_input(), dy = call.next_input(), index = call.next_input(),
                     values = call.next_input();
  const TensorHandle gates = call.next_optional(attributes.gates);
  const bool first = attributes.features_first, of_gates = attributes.gate_gradient;
  const bs_layout_view layout = layout_view(index, attributes.transposed);
  const bs_tensor xv = tokens_view(x, kOp, first), dyv = tokens_view(dy, kOp, first), w = view(values, kOp);
  const TensorHandle dw = call.output(0, x.dtype(), values.sizes());
  const TensorHandle dgates = call.output(1, sum_dtype_of(x.dtype()), {{of_gates ? layout.blocks : 0}});
  const bs_tensor dwv = view(dw, kOp), dg = view(dgates, kOp), g = gates.given() ? view(gates, kOp) : bs_tensor{};
  with_workspace(call, bs_linear_wgrad_workspace_size(&layout, xv.dtype, xv.shape[0]), [&](bs_workspace workspace) {
    require(bs_linear_wgrad(&layout, 1, &xv, &dyv, &w, gates.given() ? &g : nullptr, 0, &dwv, of_gates ? &dg : nullptr,
                            workspace, stream()));
  });
}

}  // namespace

std::vector<Op> linear_ops() {
  return {{.name = "BlocksparseLinear",
           .inputs = {"x: T", "values: T", "index: int32", "gates: gate_count * S", "bias: bias_count * T"},
           .outputs = {"y: T"},
           .attributes = {kType, kSumType, "gate_count: int >= 0", "bias_count: int >= 0", "transposed: bool = false",
                          "features_first: bool = false"},
           .compute = compute<product>},
          {.name = "BlocksparseLinearWeightGradient",
           .inputs = {"x: T", "dy: T", "index: int32", "values: T", "gates: gate_count * S"},
           .outputs = {"dw: T", "dgates: sum_type"},
           .attributes = {kType, kSumType, "sum_type: {float, double}", "gate_count: int >= 0",
                          "transposed: bool = false", "features_first: bool = false", "gate_gradient: bool = false"},
           .compute = compute<weight_gradient>}};
}

}  // namespace blocksparse::tensorflow
