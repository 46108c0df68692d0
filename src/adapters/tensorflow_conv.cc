// The convolution on TensorFlow's tensors: images [n, channels, size...], or [n, size..., channels].
#include <algorithm>

#include "adapters/tensorflow_api.h"
#include "core/text.h"

namespace blocksparse::tensorflow {

namespace {

constexpr const char* kOp = "conv";
using Sizes = std::vector<int64_t>;

bs_conv_geometry geometry_of(const Sizes& numbers) {
  const size_t rank = numbers.empty() ? 0 : (numbers.size() - 1) / 6;
  if (rank < 1 || rank > BS_MAX_SIZES || numbers.size() != 6 * rank + 1) {
    throw Failure{kInvalidArgument,
                  concat("[conv] geometry has ", numbers.size(), " numbers, needs 7, 13 or 19 (1 to 3 sizes)")};
  }
  bs_conv_geometry geometry{};
  geometry.rank = static_cast<int32_t>(rank);
  geometry.transposed = numbers[0] != 0 ? 1 : 0;
  const int64_t* from = numbers.data() + 1;
  for (int64_t* to : {geometry.kernel, geometry.stride, geometry.dilation, geometry.padding_before,
                      geometry.padding_after, geometry.output_padding}) {
    std::copy(from, from + rank, to);
    from += rank;
  }
  return geometry;
}

// Images as [n, channels, size...], whatever their order in memory.
bs_tensor images_view(const TensorHandle& images, const bs_conv_geometry& geometry, bool last) {
  const bs_tensor dense = view(images, kOp);
  if (dense.rank != geometry.rank + 2) {
    throw Failure{kInvalidArgument, concat("[conv] images are ", sizes_text(images.sizes()), ", needs n, channels and ",
                                           geometry.rank, " sizes")};
  }
  if (!last) return dense;
  bs_tensor turned = dense;
  const int32_t rank = dense.rank;
  turned.shape[1] = dense.shape[rank - 1];
  turned.stride[1] = dense.stride[rank - 1];
  for (int32_t i = 2; i < rank; ++i) {
    turned.shape[i] = dense.shape[i - 1];
    turned.stride[i] = dense.stride[i - 1];
  }
  return turned;
}

Sizes image_shape(int64_t n, int64_t channels, std::span<const int64_t> size, bool last) {
  Sizes shape = {n};
  if (!last) shape.push_back(channels);
  shape.insert(shape.end(), size.begin(), size.end());
  if (last) shape.push_back(channels);
  return shape;
}

const int32_t* order_of(const TensorHandle& order, int64_t channels) {
  if (!order.given()) return nullptr;
  const Sizes sizes = order.sizes();
  if (sizes.size() != 1 || sizes[0] != channels) {
    throw Failure{kInvalidArgument, concat("[conv] channel_order is ", sizes_text(sizes), ", needs [", channels, "]")};
  }
  return static_cast<const int32_t*>(order.data());
}

int64_t out_channels(const bs_layout_view& layout) {
  return layout.transposed != 0 ? layout.in_features : layout.out_features;
}

int64_t in_channels(const bs_layout_view& layout) {
  return layout.transposed != 0 ? layout.out_features : layout.in_features;
}

void product(const Attributes& attributes, Call& call) {
  const TensorHandle x = call.next_input(), values = call.next_input(), index = call.next_input();
  const TensorHandle gates = call.next_optional(attributes.gates), bias = call.next_optional(attributes.biases),
                     order = call.next_optional(attributes.orders);
  const bs_conv_geometry geometry = geometry_of(attributes.geometry);
  const bs_layout_view layout = layout_view(index, attributes.transposed);
  const bool last = attributes.channels_last;
  const bs_tensor xv = images_view(x, geometry, last), w = view(values, kOp);
  Sizes size(static_cast<size_t>(geometry.rank));
  require(bs_conv_output_size(&geometry, xv.shape + 2, size.data()));
  const TensorHandle y = call.output(0, x.dtype(), image_shape(xv.shape[0], out_channels(layout), size, last));
  const bs_tensor yv = images_view(y, geometry, last);
  const bs_tensor g = gates.given() ? view(gates, kOp) : bs_tensor{}, b = bias.given() ? view(bias, kOp) : bs_tensor{};
  const bs_epilogue epilogue{bias.given() ? &b : nullptr, nullptr, BS_ACTIVATION_NONE};
  const int32_t* channel_order = order_of(order, in_channels(layout));
  const size_t bytes = bs_conv_fprop_workspace_size(&layout, &geometry, &xv, channel_order);
  with_workspace(call, bytes, [&](bs_workspace workspace) {
    require(bs_conv_fprop(&layout, &geometry, &xv, &w, gates.given() ? &g : nullptr, channel_order, &epilogue, &yv,
                          workspace, stream()));
  });
}

// dx for images of the sizes in `size`.
void input_gradient(const Attributes& attributes, Call& call) {
  const TensorHandle dy = call.next_input(), values = call.next_input(), index = call.next_input(),
                     size = call.next_input();
  const TensorHandle gates = call.next_optional(attributes.gates), order = call.next_optional(attributes.orders);
  const bs_conv_geometry geometry = geometry_of(attributes.geometry);
  const bs_layout_view layout = layout_view(index, attributes.transposed);
  const bool last = attributes.channels_last;
  const bs_tensor dyv = images_view(dy, geometry, last), w = view(values, kOp);
  if (const Sizes given = size.sizes(); given.size() != 1 || given[0] != geometry.rank) {
    throw Failure{kInvalidArgument, concat("[conv] size is ", sizes_text(given), ", needs [", geometry.rank, "]")};
  }
  const std::span sizes(static_cast<const int64_t*>(size.data()), static_cast<size_t>(geometry.rank));
  Sizes of_dy(sizes.size());
  require(bs_conv_output_size(&geometry, sizes.data(), of_dy.data()));
  if (!std::ranges::equal(of_dy, std::span(dyv.shape + 2, sizes.size()))) {
    throw Failure{kInvalidArgument,
                  concat("[conv] dy is ", sizes_text(dy.sizes()), ", needs sizes ", sizes_text(of_dy))};
  }
  const TensorHandle dx = call.output(0, dy.dtype(), image_shape(dyv.shape[0], in_channels(layout), sizes, last));
  const bs_tensor dxv = images_view(dx, geometry, last), g = gates.given() ? view(gates, kOp) : bs_tensor{};
  const int32_t* channel_order = order_of(order, in_channels(layout));
  const size_t bytes = bs_conv_dgrad_workspace_size(&layout, &geometry, &dxv, channel_order);
  with_workspace(call, bytes, [&](bs_workspace workspace) {
    require(bs_conv_dgrad(&layout, &geometry, &dyv, &w, gates.given() ? &g : nullptr, channel_order, &dxv, workspace,
                          stream()));
  });
}

// dW = gates * S and dgates = <S, W> for each block, with S the sums over images and pixels
void weight_gradient(const Attributes& attributes, Call& call) {
  const TensorHandle x = call.next_input(), dy = call.next_input(), index = call.next_input(),
                     values = call.next_input();
  const TensorHandle gates = call.next_optional(attributes.gates), order = call.next_optional(attributes.orders);
  const bs_conv_geometry geometry = geometry_of(attributes.geometry);
  const bs_layout_view layout = layout_view(index, attributes.transposed);
  const bool last = attributes.channels_last, of_gates = attributes.gate_gradient;
  const bs_tensor xv = images_view(x, geometry, last), dyv = images_view(dy, geometry, last), w = view(values, kOp);
  const TensorHandle dw = call.output(0, x.dtype(), values.sizes());
  const TensorHandle dgates = call.output(1, sum_dtype_of(x.dtype()), {{of_gates ? layout.blocks : 0}});
  const bs_tensor dwv = view(dw, kOp), dg = view(dgates, kOp), g = gates.given() ? view(gates, kOp) : bs_tensor{};
  const int32_t* channel_order = order_of(order, in_channels(layout));
  const size_t bytes = bs_conv_wgrad_workspace_size(&layout, &geometry, &xv, channel_order);
  with_workspace(call, bytes, [&](bs_workspace workspace) {
    require(bs_conv_wgrad(&layout, &geometry, &xv, &dyv, &w, gates.given() ? &g : nullptr, channel_order, 0, &dwv,
                          of_gates ? &dg : nullptr, workspace, stream()));
  });
}

}  // namespace

std::vector<Op> conv_ops() {
  const std::vector<const char*> shared = {kType,
                                           kSumType,
                                           "gate_count: int >= 0",
                                           "order_count: int >= 0",
                                           "geometry: list(int)",
                                           "transposed: bool = false",
                                           "channels_last: bool = false"};
  const auto with = [&](std::initializer_list<const char*> more) {
    std::vector<const char*> attributes = shared;
    attributes.insert(attributes.end(), more);
    return attributes;
  };
  return {{.name = "BlocksparseConv",
           .inputs = {"x: T", "values: T", "index: int32", "gates: gate_count * S", "bias: bias_count * T",
                      "channel_order: order_count * int32"},
           .outputs = {"y: T"},
           .attributes = with({"bias_count: int >= 0"}),
           .compute = compute<product>},
          {.name = "BlocksparseConvInputGradient",
           .inputs = {"dy: T", "values: T", "index: int32", "size: int64", "gates: gate_count * S",
                      "channel_order: order_count * int32"},
           .outputs = {"dx: T"},
           .attributes = with({}),
           .compute = compute<input_gradient>},
          {.name = "BlocksparseConvWeightGradient",
           .inputs = {"x: T", "dy: T", "index: int32", "values: T", "gates: gate_count * S",
                      "channel_order: order_count * int32"},
           .outputs = {"dw: T", "dgates: sum_type"},
           .attributes = with({"sum_type: {float, double}", "gate_gradient: bool = false"}),
           .compute = compute<weight_gradient>}};
}

}  // namespace blocksparse::tensorflow
