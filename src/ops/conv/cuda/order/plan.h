// How CUDA ways that know no order of channels do a convolution with one: on a copy of the images in the layout's
// order. The copy lies in front of the way's own workspace. Pure functions of sizes.
#pragma once

#include "ops/conv/conv.h"

namespace blocksparse::conv {

inline bool has_order(const Product& p) { return p.x_channels != nullptr || p.y_channels != nullptr; }
inline bool has_order(const WeightGradient& g) { return g.row_channels != nullptr || g.column_channels != nullptr; }

// The images that have an order of channels, and that order.
struct OrderedImages {
  Images images;
  const int32_t* order;
};
OrderedImages ordered_images(const Product& p);
OrderedImages ordered_images(const WeightGradient& g);

// A row of channels is copied by 16 bytes, and must fit into shared memory with the table of its channels.
inline constexpr int64_t kMostOrderedChannels = 8192;

// The workspace: the copy, sums of dW in f32 (wgrad of several slices), then the way's own.
struct OrderPlan {
  int64_t slices = 0;  // of whole images, one after the other; 0: it is not done so
  int64_t sums = 0, rest = 0, end = 0;
};
// A call and its sizes alone have equal plans.
OrderPlan plan_order(const Product& p);
OrderPlan plan_order(const WeightGradient& g);

// The images of slice `index`.
Images slice_of(const Images& a, DType dtype, const OrderPlan& plan, int64_t index);
// A slice without an order, which reads or writes the copy. Slices have at most two sizes: the first has one, the last
// the other.
Product ordered_slice(const Product& p, const OrderPlan& plan, int64_t index, void* workspace);
// A slice of wgrad adds to the sums of the slices in front of it.
WeightGradient ordered_slice(const WeightGradient& g, const OrderPlan& plan, int64_t index, void* workspace);
// Whether a dW of 16 bits is summed in the workspace: rounded after each slice it would collect as many rounding
// errors.
bool sums_in_workspace(const WeightGradient& g, const OrderPlan& plan);

}  // namespace blocksparse::conv
