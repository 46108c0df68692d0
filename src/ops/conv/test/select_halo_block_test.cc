// When wgrad is by a cluster of thread blocks for each block, and how it is divided, for cards that are not here.
#include <gtest/gtest.h>

#include <tuple>
#include <utility>
#include <vector>

#include "ops/conv/cuda/halo_block/plan.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {
namespace {

constexpr cuda::Card kHopper{.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};
constexpr cuda::Card kAmpere{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024, .sm90a = false};

// Of 64 images whose borders keep y as large as x, if a kernel has a middle.
WeightGradient gradient_of(const Layout& layout, int64_t kernel, int64_t hw, int64_t dilation = 1) {
  const int64_t reach = (kernel - 1) * dilation, padding = reach / 2, out = hw + 2 * padding - reach;
  return {.dtype = DType::bf16,
          .dw_dtype = DType::bf16,
          .layout = layout.view(),
          .gather = {.kernel = {1, kernel, kernel},
                     .stride = {1, 1, 1},
                     .dilation = {1, dilation, dilation},
                     .padding = {0, padding, padding}},
          .rows = {.n = 64, .channels = layout.out_features(), .size = {1, out, out}},
          .columns = {.n = 64, .channels = layout.in_features(), .size = {1, hw, hw}}};
}

// A cluster has a block of W, or a row of its taps; its thread blocks have parts of the positions.
TEST(ConvSelectHaloBlock, AClusterOfThreadBlocksForABlock) {
  const auto plan = [](const Layout& layout, int64_t kernel) {
    const WeightGradient g = gradient_of(layout, kernel, 8);
    const Product p{.dtype = g.dtype, .layout = g.layout, .gather = g.gather, .x = g.columns, .y = g.rows};
    EXPECT_FALSE(cuda_supports(CudaWay::halo_block, g, kAmpere));
    EXPECT_NE(choose_cuda_way(g, kAmpere), CudaWay::halo_block);
    EXPECT_FALSE(cuda_supports(CudaWay::halo_block, p, kHopper));
    EXPECT_EQ(cuda_supports(CudaWay::halo_block, g, kHopper), plan_halo_block(g, kHopper.multiprocessors).has_value());
    return plan_halo_block(g, kHopper.multiprocessors);
  };
  for (const auto& [graph, block, together, parts] :
       {std::tuple("random(16,16,0.25)", 16, 3, 4), std::tuple("random(8,8,0.25)", 32, 1, 4),
        std::tuple("random(8,8,0.24)", 32, 3, 8), std::tuple("random(16,16,0.08)", 32, 1, 4),
        std::tuple("random(8,8,0.33)", 32, 3, 8), std::tuple("random(4,4,0.25)", 64, 1, 8),
        std::tuple("dense(8,8)", 64, 1, 1), std::tuple("dense(16,16)", 16, 3, 1)}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 1);
    const auto of = plan(layout, 3);
    ASSERT_TRUE(of) << graph;
    EXPECT_EQ(of->together, together) << graph;
    EXPECT_EQ(of->parts, parts) << graph;
    EXPECT_EQ(of->clusters, layout.blocks() * (3 / together));
    EXPECT_GE(of->steps, 2 * of->parts);
    EXPECT_LE(of->stages * of->stage_bytes, of->shared_bytes);
    EXPECT_LE(of->together * halo_block_sums(block, 3), of->shared_bytes);
    EXPECT_LE(of->shared_bytes, kMostHaloBlockBytes);
    const auto pointwise = plan(layout, 1);
    ASSERT_TRUE(pointwise) << graph;
    EXPECT_EQ(pointwise->raster.positions, 64 * 64) << "no zeros between rows";
    EXPECT_EQ(pointwise->rows, halo_block_tokens(block));
  }
  EXPECT_FALSE(plan(*Layout::from_graph("dense(2,2)", {.block_size = 128}, 1), 3));
  EXPECT_FALSE(plan(*Layout::from_graph("dense(2,2)", {.block_size = 8}, 1), 3));
  const Layout layout = *Layout::from_graph("random(8,8,0.25)", {.block_size = 32}, 1);
  EXPECT_EQ(plan(layout, 2)->together, 2) << "not timed apart";
  EXPECT_FALSE(plan(layout, 5));
  WeightGradient g = gradient_of(layout, 3, 8);
  EXPECT_TRUE(cuda_supports(CudaWay::halo_block, g, kHopper));
  g.dgates = &g;
  EXPECT_FALSE(cuda_supports(CudaWay::halo_block, g, kHopper));
  g.dgates = nullptr, g.gathers_rows = true;
  EXPECT_FALSE(cuda_supports(CudaWay::halo_block, g, kHopper));
}

// The last 16 positions of the last stage, for the last row of taps. `columns` is also what compute-sanitizer counts.
void expect_reads_inside(const HaloBlockPlan& plan, int32_t block) {
  const int64_t tokens = halo_block_tokens(block), row = int64_t{block} * 2, columns = plan.tap_columns;
  const int64_t dy = int64_t{plan.stages - 1} * plan.stage_bytes, x = dy + tokens * row;
  const int64_t last = x + ((plan.together - 1) * plan.raster.row_step + tokens - 16) * row;
  EXPECT_EQ(last + (16 + (columns - 1) * plan.raster.column_step) * row, x + plan.rows * row);
  EXPECT_LE(x + plan.rows * row, plan.stages * plan.stage_bytes);
  EXPECT_LE(last + 16 * columns * row, plan.shared_bytes);
  EXPECT_LE(dy + (tokens - 16) * row + 16 * 64 * 2, plan.shared_bytes) << "64 outputs of dy";
  EXPECT_LE(plan.shared_bytes, kMostHaloBlockBytes);
  const bool two = plan.resident == 2 * kHopper.multiprocessors;
  EXPECT_EQ(two, plan.stages * plan.stage_bytes <= 108 * 1024);
  EXPECT_LE((two ? 2 : 1) * (plan.shared_bytes + 2048), 228 * 1024) << "of an SM";
}

TEST(ConvSelectHaloBlock, AStageHoldsAllThatAClusterReads) {
  int plans = 0;
  for (const auto& [graph, block] : {std::pair("dense(8,8)", 16), std::pair("diagonal(4)", 32),
                                     std::pair("dense(8,8)", 32), std::pair("diagonal(4)", 64)}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 1);
    for (int64_t hw : {7, 14, 79, 86, 262, 400}) {
      for (int64_t kernel : {1, 2, 3}) {
        for (int64_t dilation : {1, 2, 9, 24}) {
          SCOPED_TRACE(testing::Message() << graph << " " << block << " " << hw << " " << kernel << " " << dilation);
          const auto plan = plan_halo_block(gradient_of(layout, kernel, hw, dilation), kHopper.multiprocessors);
          if (!plan) continue;  // too wide, or the taps reach beyond the image
          ++plans;
          expect_reads_inside(*plan, block);
        }
      }
    }
  }
  EXPECT_GT(plans, 150);
}

TEST(ConvSelectHaloBlock, AGradientOfFewStepsIsByBlocks) {
  const auto is_by_blocks = [](std::string_view graph, int32_t block, int64_t kernel, int64_t hw,
                               const cuda::Card& card = kHopper) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 1);
    WeightGradient g = gradient_of(layout, kernel, hw);
    const CudaWay way = choose_cuda_way(g, card);
    const std::vector<int32_t> order(static_cast<size_t>(layout.in_features()));
    g.column_channels = order.data();
    if (way != CudaWay::halo_block) return false;
    EXPECT_EQ(choose_cuda_way(g, card), way) << "with an order of channels";
    return true;
  };
  for (const auto& [graph, block, kernel, most] :
       {std::tuple("random(16,16,0.1)", 16, 3, 28), std::tuple("random(16,16,0.1)", 16, 1, 22),
        std::tuple("random(8,8,0.1)", 32, 3, 18), std::tuple("random(8,8,0.1)", 32, 1, 28),
        std::tuple("random(4,4,0.1)", 64, 3, 18), std::tuple("random(4,4,0.1)", 64, 1, 11)}) {
    EXPECT_TRUE(is_by_blocks(graph, block, kernel, most)) << graph << kernel;
    EXPECT_FALSE(is_by_blocks(graph, block, kernel, most + 1)) << graph << kernel;
  }
  // With more blocks a thread block has a larger part of the steps.
  EXPECT_TRUE(is_by_blocks("random(8,8,0.5)", 32, 3, 14));
  EXPECT_TRUE(is_by_blocks("random(8,8,0.25)", 32, 3, 14)) << "rows of taps apart";
  EXPECT_FALSE(is_by_blocks("random(8,8,0.25)", 32, 3, 20));
  EXPECT_FALSE(is_by_blocks("dense(8,8)", 32, 3, 14));
  EXPECT_TRUE(is_by_blocks("dense(8,8)", 64, 3, 7));
  EXPECT_FALSE(is_by_blocks("dense(8,8)", 64, 3, 8));
  EXPECT_TRUE(is_by_blocks("random(32,32,0.25)", 16, 3, 7)) << "256 blocks, 264 thread blocks at once";
  EXPECT_FALSE(is_by_blocks("random(32,32,0.26)", 16, 3, 7)) << "266 blocks";
  cuda::Card smaller = kHopper;
  smaller.multiprocessors = 114;
  EXPECT_FALSE(is_by_blocks("random(32,32,0.25)", 16, 3, 7, smaller));
  EXPECT_TRUE(is_by_blocks("random(8,8,0.25)", 64, 1, 7)) << "128 thread blocks";
  EXPECT_FALSE(is_by_blocks("random(8,8,0.25)", 64, 1, 7, smaller));
  EXPECT_FALSE(is_by_blocks("random(8,8,0.5)", 64, 1, 7)) << "256 thread blocks";
  EXPECT_TRUE(is_by_blocks("random(4,4,0.25)", 32, 1, 6)) << "2304 pixels";
  EXPECT_FALSE(is_by_blocks("random(4,4,0.25)", 32, 1, 5)) << "1600 pixels";
  EXPECT_TRUE(is_by_blocks("random(4,4,0.25)", 32, 3, 5));
}

}  // namespace
}  // namespace blocksparse::conv
