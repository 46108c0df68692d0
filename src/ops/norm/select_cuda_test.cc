// How the layer norm divides rows over clusters, for a card that need not be there.
#include "ops/norm/cuda/plan.h"

#include <gtest/gtest.h>

namespace blocksparse::norm {
namespace {

TEST(NormPlan, LongRowsAreSharedByClusters) {
  constexpr int32_t kMultiprocessors = 132;
  const WidePlan some = plan_wide_forward(256, 1, 5600 / 8, kMultiprocessors);
  EXPECT_EQ(some.cluster, 4);
  EXPECT_EQ(some.per, 175);
  EXPECT_EQ(some.width, 192);
  EXPECT_EQ(some.parts * some.cluster, 256) << "all at once";
  const WidePlan more = plan_wide_forward(256, 1, 18432 / 8, kMultiprocessors);
  EXPECT_EQ(more.cluster, 8);
  EXPECT_EQ(more.tokens, 8) << "as many as fit on the card at once";
  EXPECT_EQ(more.parts * more.cluster, 256);
  EXPECT_EQ(plan_wide_forward(256, 1, 64 / 8, kMultiprocessors).cluster, 1);
  EXPECT_FALSE(plan_wide_forward(256, 1, 100000 / 8, kMultiprocessors).fits());
  const WidePlan cell = plan_wide_cell(256, 18432 / 8, kMultiprocessors);
  EXPECT_EQ(cell.cluster, 8);
  EXPECT_EQ(cell.parts, 28) << "each walks some tokens";
  EXPECT_EQ(plan_wide_cell(256, 5600 / 8, kMultiprocessors).cluster, 2);
  EXPECT_EQ(plan_wide_cell(256, 5600 / 8, kMultiprocessors).parts, 128) << "all at once";
  for (const int64_t n : {1, 7, 256, 100000}) {
    for (const int64_t vectors : {1, 31, 288, 289, 700, 2304, 3000}) {
      for (const WidePlan& p :
           {plan_wide_forward(n, 1, vectors, kMultiprocessors), plan_wide_forward(n, 3, vectors, kMultiprocessors),
            plan_wide_cell(n, vectors, kMultiprocessors)}) {
        ASSERT_TRUE(p.fits());
        EXPECT_GE(int64_t{p.per} * p.cluster, vectors);
        EXPECT_GE(p.width, p.per);
        EXPECT_LE(p.threads(), p.tokens == 8 ? kManyRowsThreads : kWideThreads);
      }
      const WidePlan p = plan_wide_forward(n, 1, vectors, kMultiprocessors);
      EXPECT_GE(p.parts * p.tokens_at_once(), n);
    }
  }
}

}  // namespace
}  // namespace blocksparse::norm
