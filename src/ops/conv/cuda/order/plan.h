// How the CUDA ways that know no order of channels do a convolution with one: on a copy of the images in the layout's
// order, which is in front of what they need of workspace. Pure functions of sizes.
#pragma once

#include "ops/conv/conv.h"

namespace blocksparse::conv {

inline bool has_order(const Product& p) { return p.x_channels != nullptr || p.y_channels != nullptr; }
inline bool has_order(const WeightGradient& g) { return g.row_channels != nullptr || g.column_channels != nullptr; }

// The images that the order is of, and that order.
struct OrderedImages {
  Images images;
  const int32_t* order;
};
OrderedImages ordered_images(const Product& p);
OrderedImages ordered_images(const WeightGradient& g);

// Copied by 16 bytes, a row of channels and what says where they go in shared memory.
inline constexpr int64_t kMostOrderedChannels = 8192;

// In the workspace: the copy, sums of dW in f32 (wgrad of several slices), then what is the way's own.
struct OrderPlan {
  int64_t slices = 0;  // of whole images, one after the other; 0: this is not done so
  int64_t sums = 0, rest = 0, end = 0;
};
// The same for a call and for its sizes alone.
OrderPlan plan_order(const Product& p);
OrderPlan plan_order(const WeightGradient& g);

// Some images of `a`.
Images slice_of(const Images& a, DType dtype, const OrderPlan& plan, int64_t index);
// A slice without an order, that reads or writes the copy. Slices are of two sizes at most, of which the first and the
// last have one each.
Product ordered_slice(const Product& p, const OrderPlan& plan, int64_t index, void* workspace);
// A slice adds to what the ones in front of it have left.
WeightGradient ordered_slice(const WeightGradient& g, const OrderPlan& plan, int64_t index, void* workspace);
// Whether dW of 16 bits is summed in the workspace: rounded after each slice it would be wrong by as many roundings.
bool sums_in_workspace(const WeightGradient& g, const OrderPlan& plan);

}  // namespace blocksparse::conv
