// How a convolution on the CPU is divided.
#include <gtest/gtest.h>

#include "ops/conv/cpu/plan.h"

namespace blocksparse::conv {
namespace {

// fprop with a filter of stride 1 and one image, sizes {depth, height, width}.
Plan plan_of(const Layout& layout, SpatialSizes size, SpatialSizes kernel, SpatialSizes before, SpatialSizes after) {
  Product p{.layout = layout, .gather = {.kernel = kernel, .padding = before}};
  p.x = {.n = 1, .channels = layout.in_features(), .size = size};
  p.y = {.n = 1, .channels = layout.out_features()};
  for (size_t i = 0; i < 3; ++i) p.y.size[i] = size[i] + before[i] + after[i] - kernel[i] + 1;
  return plan_product(p);
}

// What pads a row on the right pads the next one on the left, but only where a box holds whole rows: at the edge of
// one that was cut, neighbours are pixels.
TEST(ConvPlan, OnlyWholeRowsShareTheirZeros) {
  const Layout layout = *Layout::from_graph("dense(1)", {.block_size = 128});
  const Plan whole = plan_of(layout, {1, 2, 40}, {1, 2, 5}, {0, 1, 2}, {0, 0, 2});
  EXPECT_EQ(whole.axis[2].box, 40);
  EXPECT_EQ(whole.axis[2].reach, 44);
  EXPECT_EQ(whole.axis[2].pitch, 42);

  const Plan cut = plan_of(layout, {1, 2, 4080}, {1, 2, 5}, {0, 1, 5}, {0, 0, 4085});
  const AxisPlan& rows = cut.axis[2];
  ASSERT_LT(rows.box, rows.places);
  EXPECT_EQ(rows.reach, rows.box + 4);
  EXPECT_EQ(rows.pitch, rows.reach);
}

}  // namespace
}  // namespace blocksparse::conv
