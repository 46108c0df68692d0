// The convolution's kernels. Arguments are in the order of the schemas in python/blocksparse/torch/ops/conv.py. Checks
// and shapes of results are those of that file, too.
#include <algorithm>
#include <array>

#include "adapters/torch_api.h"
#include "core/text.h"
#include "ops/conv/conv.h"

namespace blocksparse::pytorch {

namespace {

constexpr const char* kOp = "conv";
using Numbers = std::vector<int64_t>;

// `numbers` is the argument that the schemas call geometry.
ConvGeometry geometry_of(const Numbers& numbers) {
  const size_t rank = numbers.empty() ? 0 : (numbers.size() - 1) / 6;
  if (rank < 1 || rank > kMaxSizes || numbers.size() != 6 * rank + 1) {
    raise(invalid("[conv] geometry has ", numbers.size(), " numbers, needs 7, 13 or 19 (1 to 3 sizes)"));
  }
  ConvGeometry geometry{.rank = static_cast<int32_t>(rank), .transposed = numbers[0] != 0};
  const int64_t* from = numbers.data() + 1;
  for (SpatialSizes* to : {&geometry.kernel, &geometry.stride, &geometry.dilation, &geometry.padding_before,
                           &geometry.padding_after, &geometry.output_padding}) {
    std::copy(from, from + rank, to->begin());
    from += rank;
  }
  return geometry;
}

// The sizes of y for those of x. After this call the geometry has been checked, so results can be allocated.
SpatialSizes output_size(const ConvGeometry& geometry, std::span<const int64_t> size) {
  if (size.size() != static_cast<size_t>(geometry.rank)) {
    raise(invalid("[conv] x has ", size.size(), " sizes, the geometry ", geometry.rank));
  }
  SpatialSizes padded = {1, 1, 1};
  std::ranges::copy(size, padded.begin());
  const auto out = conv_output_size(geometry, padded);
  if (!out.ok()) raise(out.status());
  return *out;
}

std::span<const int64_t> size_of_images(const TensorHandle& x) {
  const auto sizes = x.sizes();
  return sizes.size() < 2 ? std::span<const int64_t>() : sizes.subspan(2);
}

// New images, as many as `like` has.
TensorHandle empty_images(const Tensor& like, int64_t channels, std::span<const int64_t> size, bool channels_last) {
  if (like.rank == 0) raise(invalid("[conv] images are [], needs [n, channels, size...]"));
  if (channels < 0) raise(invalid("[conv] ", channels, " channels, needs 0 or more"));
  const size_t rank = size.size() + 2;
  std::array<int64_t, kMaxRank> shape = {like.shape[0], channels}, strides = {};
  std::ranges::copy(size, shape.begin() + 2);
  const int32_t code = code_of(like.dtype);
  if (!channels_last) return empty_contiguous({shape.data(), rank}, code, like.device);
  strides[1] = 1;
  int64_t step = channels;
  for (size_t i = rank; i-- > 2; step = times(step, shape[i])) strides[i] = step;
  strides[0] = step;
  return empty({shape.data(), rank}, {strides.data(), rank}, code, like.device);
}

// The layout of a W of `blocks` blocks of size `b`. x and y need at least the dimensions [n, channels].
LayoutView view_of(const TensorHandle& index, bool transposed, int64_t blocks, int64_t b, const TensorHandle& y,
                   const TensorHandle& x) {
  const auto ys = y.sizes(), xs = x.sizes();
  if (xs.size() < 2 || ys.size() < 2) {
    raise(invalid("[conv] x is ", sizes_text(xs), ", y ", sizes_text(ys), ", needs [n, channels, size...]"));
  }
  const auto block_size = static_cast<int32_t>(std::clamp<int64_t>(b, 0, 256));
  return pytorch::view_of(kOp, index, transposed, {block_size, ys[1], xs[1], blocks});
}

LayoutView view_of(const TensorHandle& index, bool transposed, const TensorHandle& values, const TensorHandle& y,
                   const TensorHandle& x) {
  const auto shape = values.sizes();
  if (shape.size() != 4) raise(invalid("[conv] values are ", sizes_text(shape), ", needs [blocks, taps, b, b]"));
  return view_of(index, transposed, shape[0], shape[2], y, x);
}

std::span<const int32_t> order_of(const TensorHandle& order, int64_t channels) {
  if (!order.given()) return {};
  const auto shape = order.sizes();
  if (order.dtype() != api.int32_code || shape.size() != 1 || shape[0] != channels ||
      (channels > 1 && order.strides()[0] != 1)) {
    raise(invalid("[conv] channel_order is ", dtype_name(order.dtype()), " ", sizes_text(shape), ", needs int32 [",
                  channels, "]"));
  }
  return {static_cast<const int32_t*>(order.data()), static_cast<size_t>(channels)};
}

void fprop(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]);
  const TensorHandle bias = take_optional(stack[7]), residual = take_optional(stack[8]),
                     gates = take_optional(stack[9]), order = take_optional(stack[10]);
  const Numbers numbers = take_list(stack[3]);
  const auto out_channels = static_cast<int64_t>(stack[4]);
  const bool channels_last = flag(stack[5]), transposed = flag(stack[6]), tf32 = flag(stack[12]);
  const auto activation = static_cast<Activation>(stack[11]);

  check_devices(kOp, x, {&values, &index, &bias, &residual, &gates, &order});
  const ConvGeometry geometry = geometry_of(numbers);
  const SpatialSizes sizes = output_size(geometry, size_of_images(x));
  const Tensor xv = x.view(kOp);
  const std::span out_size(sizes.data(), static_cast<size_t>(geometry.rank));
  TensorHandle y = empty_images(xv, out_channels, out_size, channels_last);
  const Convolution conv{.layout = view_of(index, transposed, values, y, x),
                         .geometry = geometry,
                         .channel_order = order_of(order, xv.shape[1])};
  const size_t bytes = conv::workspace_size_like(conv, xv, conv_fprop_workspace_size);
  with_workspace(bytes, xv.device, [&](Workspace workspace) {
    require(conv_fprop(conv, xv, {values.view(kOp), gates.view(kOp)}, {bias.view(kOp), residual.view(kOp), activation},
                       y.view(kOp), workspace, stream(kOp, xv.device, tf32)));
  });
  stack[0] = y.release();
}

void dgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle dy(stack[0]), values(stack[1]), index(stack[2]);
  const TensorHandle gates = take_optional(stack[8]), order = take_optional(stack[9]);
  const Numbers numbers = take_list(stack[3]), size = take_list(stack[5]);
  const auto in_channels = static_cast<int64_t>(stack[4]);
  const bool channels_last = flag(stack[6]), transposed = flag(stack[7]), tf32 = flag(stack[10]);

  check_devices(kOp, dy, {&values, &index, &gates, &order});
  const ConvGeometry geometry = geometry_of(numbers);
  output_size(geometry, size);
  const Tensor dyv = dy.view(kOp);
  TensorHandle dx = empty_images(dyv, in_channels, size, channels_last);
  const Tensor dxv = dx.view(kOp);
  const Convolution conv{.layout = view_of(index, transposed, values, dy, dx),
                         .geometry = geometry,
                         .channel_order = order_of(order, in_channels)};
  const size_t bytes = conv::workspace_size_like(conv, dxv, conv_dgrad_workspace_size);
  with_workspace(bytes, dyv.device, [&](Workspace workspace) {
    require(conv_dgrad(conv, dyv, {values.view(kOp), gates.view(kOp)}, dxv, workspace, stream(kOp, dyv.device, tf32)));
  });
  stack[0] = dx.release();
}

void wgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), dy(stack[1]), index(stack[2]);
  const TensorHandle values = take_optional(stack[8]), gates = take_optional(stack[9]),
                     order = take_optional(stack[10]);
  const Numbers numbers = take_list(stack[3]);
  const auto blocks = static_cast<int64_t>(stack[4]), b = static_cast<int64_t>(stack[5]);
  const bool transposed = flag(stack[6]), wide = flag(stack[7]), gate_gradient = flag(stack[11]),
             tf32 = flag(stack[12]);

  check_devices(kOp, x, {&dy, &index, &values, &gates, &order});
  const ConvGeometry geometry = geometry_of(numbers);
  output_size(geometry, size_of_images(x));
  const LayoutView layout = view_of(index, transposed, blocks, b, dy, x);
  if (blocks != layout.blocks || b != layout.block_size) {  // dw has their shape and could be too large for a message
                                                            // later
    raise(invalid("[conv] dw has ", blocks, " blocks of ", b, ", needs ", layout.blocks, " of ", layout.block_size));
  }
  const Tensor xv = x.view(kOp), dyv = dy.view(kOp);
  int64_t taps = 1;
  for (int32_t i = 0; i < geometry.rank; ++i) taps *= geometry.kernel[static_cast<size_t>(i)];
  const DType sums = sum_dtype(xv.dtype);
  TensorHandle dw = empty_contiguous({{blocks, taps, b, b}}, code_of(wide ? sums : xv.dtype), xv.device);
  TensorHandle dgates = empty_contiguous({{gate_gradient ? blocks : 0}}, code_of(sums), xv.device);
  const Convolution conv{.layout = layout, .geometry = geometry, .channel_order = order_of(order, xv.shape[1])};
  const size_t bytes = conv::workspace_size_like(conv, xv, conv_wgrad_workspace_size);
  with_workspace(bytes, xv.device, [&](Workspace workspace) {
    require(conv_wgrad(conv, xv, dyv, {values.view(kOp), gates.view(kOp)}, Accumulate::no,
                       {dw.view(kOp), gate_gradient ? dgates.view(kOp) : Tensor()}, workspace,
                       stream(kOp, xv.device, tf32)));
  });
  stack[0] = dw.release();
  stack[1] = dgates.release();
}

constexpr Row kKernels[] = {{"conv_fprop", fprop}, {"conv_dgrad", dgrad}, {"conv_wgrad", wgrad}};

}  // namespace

std::span<const Row> conv_kernels() { return kKernels; }

}  // namespace blocksparse::pytorch
