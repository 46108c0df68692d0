#include "ops/conv/cuda/order/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/places.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {

namespace {

void* behind(void* workspace, int64_t bytes) {
  return workspace == nullptr ? nullptr : static_cast<char*>(workspace) + bytes;
}

// Removes the pointers, which decide between ways: without them a plan counts every way that a call of these sizes may
// take.
Product sizes_alone(Product p) {
  p.x.data = p.y.data = nullptr;
  p.residual = {};
  p.w = p.gates = p.bias = nullptr;
  return p;
}

WeightGradient sizes_alone(WeightGradient g) {
  g.rows.data = g.columns.data = nullptr;
  g.w = g.gates = nullptr;
  g.dw = g.dgates = nullptr;
  g.dw_dtype = DType::f32;
  return g;
}

int64_t sum_bytes(const Product&) { return 0; }
int64_t sum_bytes(const WeightGradient& g) {
  const int64_t block = g.layout.block_size;
  return whole_lines(g.layout.blocks * g.gather.taps() * block * block * 4);
}

// The plan with so many slices, or an empty one if that does not fit.
template <class Problem>
OrderPlan place(const Problem& p, const Images& images, int64_t slices) {
  OrderPlan plan{.slices = slices};
  plan.sums = whole_lines(ceil_div(images.n, slices) * images.image_stride() * size_of(p.dtype));
  plan.rest = plan.sums + (slices > 1 ? sum_bytes(p) : 0);
  for (int64_t index = 0; index < slices; index += std::max<int64_t>(1, slices - 1)) {  // the first and the last
    const Problem slice = ordered_slice(p, plan, index, nullptr);
    if (!has_fast_way(slice)) return {};
    plan.end = std::max(plan.end, plan.rest + static_cast<int64_t>(cuda_workspace_bytes(slice)));
  }
  return plan.end < kMostConvWorkspace ? plan : OrderPlan{};
}

// The plan with as few slices as there is room for.
template <class Problem>
OrderPlan plan(const Problem& given) {
  const Problem p = sizes_alone(given);
  const Images images = ordered_images(p).images;
  const int64_t image_bytes = images.image_stride() * size_of(p.dtype);
  if (!has_order(p) || size_of(p.dtype) != 2 || !images.channels_last || images.channels % 8 != 0 ||
      images.channels > kMostOrderedChannels || images.n == 0 || image_bytes == 0) {
    return {};
  }
  const OrderPlan whole = place(p, images, 1);
  if (whole.slices == 1) return whole;
  const Problem all = ordered_slice(p, {.slices = 1}, 0, nullptr);
  const int64_t others = sum_bytes(p) + static_cast<int64_t>(cuda_workspace_bytes(all));
  const int64_t most = (kMostConvWorkspace - kLineBytes - others) / image_bytes;
  return most < 1 ? OrderPlan{} : place(p, images, ceil_div(images.n, most));
}

}  // namespace

OrderedImages ordered_images(const Product& p) {
  return p.x_channels != nullptr ? OrderedImages{p.x, p.x_channels} : OrderedImages{p.y, p.y_channels};
}

OrderedImages ordered_images(const WeightGradient& g) {
  return g.row_channels != nullptr ? OrderedImages{g.rows, g.row_channels}
                                   : OrderedImages{g.columns, g.column_channels};
}

OrderPlan plan_order(const Product& p) { return plan(p); }
OrderPlan plan_order(const WeightGradient& g) { return plan(g); }

Images slice_of(const Images& a, DType dtype, const OrderPlan& plan, int64_t index) {
  const int64_t first = a.n * index / plan.slices, last = a.n * (index + 1) / plan.slices;
  Images slice = a;
  slice.n = last - first;
  if (a.data != nullptr) {
    slice.data = static_cast<const char*>(a.data) + first * a.image_stride() * size_of(dtype);
  }
  return slice;
}

Product ordered_slice(const Product& p, const OrderPlan& plan, int64_t index, void* workspace) {
  Product slice = p;
  for (Images* a : {&slice.x, &slice.y, &slice.residual}) *a = slice_of(*a, p.dtype, plan, index);
  (p.x_channels != nullptr ? slice.x : slice.y).data = workspace;
  slice.x_channels = slice.y_channels = nullptr;
  return slice;
}

bool sums_in_workspace(const WeightGradient& g, const OrderPlan& plan) {
  return plan.slices > 1 && g.dw_dtype != DType::f32;
}

WeightGradient ordered_slice(const WeightGradient& g, const OrderPlan& plan, int64_t index, void* workspace) {
  WeightGradient slice = g;
  for (Images* a : {&slice.rows, &slice.columns}) *a = slice_of(*a, g.dtype, plan, index);
  (g.row_channels != nullptr ? slice.rows : slice.columns).data = workspace;
  slice.row_channels = slice.column_channels = nullptr;
  slice.accumulate = g.accumulate || index > 0;
  if (sums_in_workspace(g, plan)) {
    slice.dw = behind(workspace, plan.sums);
    slice.dw_dtype = DType::f32;
  }
  return slice;
}

}  // namespace blocksparse::conv
