// The convolution's handlers. Operands, numbers and results are in the order of python/blocksparse/jax/ops/conv.py.
#include <algorithm>

#include "adapters/xla_api.h"
#include "blocksparse/c_api.h"
#include "core/text.h"
#include "ops/conv/conv.h"

namespace blocksparse::xla {

namespace {

constexpr size_t kChannelsLast = Call::kCommon, kActivation = Call::kCommon + 1, kTransposed = Call::kCommon + 2,
                 kGeometry = Call::kCommon + 3;
constexpr int kBias = 0, kResidual = 1, kGates = 2, kOrder = 3;

// Sees [n, size..., channels] in memory as [n, channels, size...] if channels_last, otherwise changes nothing.
Result<Tensor> seen(Result<Tensor> tensor, bool channels_last) {
  if (!tensor.ok() || !channels_last || !tensor->given()) return tensor;
  if (tensor->rank < 3) return invalid("[conv] an array of ", tensor->rank, " dimensions, needs [n, size, channels]");
  for (auto* numbers : {&tensor->shape, &tensor->stride}) {
    std::rotate(numbers->begin() + 1, numbers->begin() + tensor->rank - 1, numbers->begin() + tensor->rank);
  }
  return tensor;
}

// The numbers after the common ones: kernel, stride, dilation, padding before, padding after and output padding.
Result<ConvGeometry> geometry_of(const Call& call) {
  const auto numbers = call.numbers_from(kGeometry);
  const size_t rank = numbers.size() / 6;
  if (rank < 1 || rank > kMaxSizes || numbers.size() != 6 * rank) {
    return invalid("[conv] geometry has ", numbers.size(), " numbers, needs 6, 12 or 18 (1 to 3 sizes)");
  }
  ConvGeometry geometry{.rank = static_cast<int32_t>(rank), .transposed = call.number(kTransposed) != 0};
  const int64_t* from = numbers.data();
  for (SpatialSizes* to : {&geometry.kernel, &geometry.stride, &geometry.dilation, &geometry.padding_before,
                           &geometry.padding_after, &geometry.output_padding}) {
    std::copy(from, from + rank, to->begin());
    from += rank;
  }
  return geometry;
}

Status begin(Call& call) {
  BS_RETURN_IF_ERROR(call.begin(kGeometry + 6));
  return call.buffers(3, 1);
}

Result<std::span<const int32_t>> next_order(Call& call) {
  return call.has(kOrder) ? call.next_integers() : std::span<const int32_t>();
}

Status fprop(Call& call) {
  BS_RETURN_IF_ERROR(begin(call));
  const bool last = call.number(kChannelsLast) != 0;
  BS_TAKE(x, seen(call.next_operand(), last));
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(order, next_order(call));
  BS_TAKE(bias, call.next_optional(kBias));
  BS_TAKE(residual, seen(call.next_optional(kResidual), last));
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(y, seen(call.next_result(), last));
  BS_TAKE(geometry, geometry_of(call));
  BS_TAKE(stream, call.stream());
  const auto activation = static_cast<Activation>(call.number(kActivation));
  const Convolution conv{.layout = layout, .geometry = geometry, .channel_order = order};
  const size_t bytes = conv::workspace_size_like(conv, x, conv_fprop_workspace_size);
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return conv_fprop(conv, x, {values, gates}, {bias, residual, activation}, y, workspace, stream);
  });
}

Status dgrad(Call& call) {
  BS_RETURN_IF_ERROR(begin(call));
  const bool last = call.number(kChannelsLast) != 0;
  BS_TAKE(dy, seen(call.next_operand(), last));
  BS_TAKE(values, call.next_operand());
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(order, next_order(call));
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(dx, seen(call.next_result(), last));
  BS_TAKE(geometry, geometry_of(call));
  BS_TAKE(stream, call.stream());
  const Convolution conv{.layout = layout, .geometry = geometry, .channel_order = order};
  const size_t bytes = conv::workspace_size_like(conv, dx, conv_dgrad_workspace_size);
  return call.with_workspace(
      bytes, [&](Workspace workspace) { return conv_dgrad(conv, dy, {values, gates}, dx, workspace, stream); });
}

Status wgrad(Call& call) {
  BS_RETURN_IF_ERROR(begin(call));
  const bool last = call.number(kChannelsLast) != 0;
  BS_TAKE(x, seen(call.next_operand(), last));
  BS_TAKE(dy, seen(call.next_operand(), last));
  BS_TAKE(layout, call.next_layout());
  BS_TAKE(order, next_order(call));
  BS_TAKE(gates, call.next_optional(kGates));
  BS_TAKE(dw, call.next_result());
  BS_TAKE(geometry, geometry_of(call));
  BS_TAKE(stream, call.stream());
  const Convolution conv{.layout = layout, .geometry = geometry, .channel_order = order};
  const size_t bytes = conv::workspace_size_like(conv, x, conv_wgrad_workspace_size);
  return call.with_workspace(bytes, [&](Workspace workspace) {
    return conv_wgrad(conv, x, dy, {{}, gates}, Accumulate::no, dw, workspace, stream);
  });
}

}  // namespace

}  // namespace blocksparse::xla

extern "C" {

void* bs_xla_conv_fprop(void* call_frame) {
  return blocksparse::xla::handle("conv", call_frame, blocksparse::xla::fprop);
}
void* bs_xla_conv_dgrad(void* call_frame) {
  return blocksparse::xla::handle("conv", call_frame, blocksparse::xla::dgrad);
}
void* bs_xla_conv_wgrad(void* call_frame) {
  return blocksparse::xla::handle("conv", call_frame, blocksparse::xla::wgrad);
}

}  // extern "C"
