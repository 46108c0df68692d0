// The choice of CUDA kernels, and what is said of layouts without looking at their tables.
#include <gtest/gtest.h>

#include <tuple>

#include "blocksparse/layout.h"
#include "core/index.h"
#include "ops/linear/select_cuda.h"

namespace blocksparse::linear {
namespace {

TEST(SelectCuda, NamesAreReadAndWritten) {
  for (CudaKernel kernel : kAllCudaKernels) EXPECT_EQ(parse_cuda_kernel(name_of(kernel)), kernel);
  EXPECT_FALSE(parse_cuda_kernel("fastest"));
}

TEST(SelectCuda, TheGenericKernelAlwaysAnswers) {
  for (int32_t arch : {80, 86, 89, 90, 100, 120}) {
    for (int32_t block : {8, 16, 32, 64, 128}) {
      const CudaProblem p{.dtype = DType::f64, .block = block, .n = 1, .inputs = 1, .outputs = 1, .blocks = 1};
      EXPECT_TRUE(cuda_supports(CudaKernel::generic, p, {.arch = arch, .multiprocessors = 1}));
    }
  }
  EXPECT_FALSE(cuda_supports(CudaKernel::generic, {}, {.arch = 75, .multiprocessors = 1}));
}

TEST(SelectCuda, TransposedAndBackwardExchangeTheSides) {
  LayoutView view{.block_size = 32, .out_features = 100, .in_features = 320, .blocks = 7};
  EXPECT_EQ(cuda_problem(Pass::fprop, view, DType::f32, 5).outputs, 100);
  EXPECT_EQ(cuda_problem(Pass::dgrad, view, DType::f32, 5).outputs, 320);
  EXPECT_EQ(cuda_problem(Pass::fprop, view.t(), DType::f32, 5).outputs, 320);
  EXPECT_EQ(cuda_problem(Pass::dgrad, view.t(), DType::f32, 5).outputs, 100);
  EXPECT_TRUE(cuda_problem(Pass::dgrad, view, DType::f32, 5).by_in);
  EXPECT_EQ(cuda_problem(Pass::fprop, view, DType::f32, 5).output_blocks(), 4);
}

TEST(SelectCuda, WorkspaceHoldsSlicesOfFewTokens) {
  LayoutView view{.block_size = 8, .out_features = 1600, .in_features = 1600, .blocks = 1600};
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::fprop, view, DType::bf16, 64)), 0u) << "no row is cut";
  view.cut_by_out = true;
  const CudaProblem few = cuda_problem(Pass::fprop, view, DType::bf16, 64);
  ASSERT_GT(few.slots, 0);
  EXPECT_EQ(cuda_workspace_bytes(few), static_cast<size_t>(few.slots * 64 * 8 * 4));
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::fprop, view, DType::bf16, 5000)), 0u) << "rows are walked whole";
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::bf16, 64)), 0u) << "terms fit into a launch";
  EXPECT_EQ(cuda_workspace_bytes(cuda_problem(Pass::wgrad, view, DType::bf16, 100000)),
            static_cast<size_t>(kMostTerms * kTermBytes));
}

// The bound has to hold for every layout.
TEST(SelectCuda, NoLayoutHasMoreSlotsThanItsSizesAllow) {
  for (const char* graph : {"ba(200,4)", "ba(384,8)", "dense(2,300)", "dense(300,2)", "dense(40,40)", "random(64,0.3)",
                            "random(16,400,0.4)", "random(400,16,0.4)", "diagonal(50)", "dense(1,33)", "dense(1,32)"}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8}, 3);
    const Header& h = header_of(layout);
    EXPECT_LE(h.by_out.slots, most_slots(h.out_blocks, h.in_blocks, h.blocks)) << graph;
    EXPECT_LE(h.by_in.slots, most_slots(h.in_blocks, h.out_blocks, h.blocks)) << graph;
  }
  EXPECT_EQ(most_slots(128, 128, 4096), 64 + 63) << "rows of more than 64 blocks are cut";
  EXPECT_EQ(most_slots(64, 64, 4096), 0) << "no row is long enough";
  EXPECT_EQ(most_slots(0, 0, 0), 0);
}

TEST(LayoutView, OfTablesOnADevice) {
  const Layout layout = *Layout::from_graph("random(9,7,0.4)", {.block_size = 16, .out_features = 140}, 1);
  const LayoutView::Sizes sizes{16, 140, 112, layout.blocks()};
  const auto view = LayoutView::on_device(layout.index(), sizes, {DeviceType::cuda, 1});
  ASSERT_TRUE(view.ok()) << view.status().message();
  EXPECT_EQ(view->device, (Device{DeviceType::cuda, 1}));
  EXPECT_EQ(view->blocks, layout.blocks());
  EXPECT_FALSE(view->cut_by_out || view->cut_by_in);
  auto wrong = sizes;
  wrong.blocks += 20;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
  wrong = sizes;
  wrong.block_size = 12;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
  wrong = sizes;
  wrong.in_features = int64_t{1} << 60;
  EXPECT_FALSE(LayoutView::on_device(layout.index(), wrong, {}).ok());
}

TEST(LayoutView, TheNumberOfWordsTellsWhatIsCut) {
  for (const auto& [graph, by_out, by_in] :
       {std::tuple("dense(8,8)", false, false), std::tuple("dense(2,300)", true, false),
        std::tuple("dense(300,2)", false, true), std::tuple("ba(200,4)", true, true)}) {
    const Layout layout = *Layout::from_graph(graph, {.block_size = 8}, 1);
    const auto view = LayoutView::on_device(
        layout.index(), {8, layout.out_features(), layout.in_features(), layout.blocks()}, {DeviceType::cuda, 0});
    ASSERT_TRUE(view.ok()) << view.status().message();
    for (const LayoutView& v : {layout.view(), *view}) {
      EXPECT_EQ(v.cut_by_out, by_out) << graph;
      EXPECT_EQ(v.cut_by_in, by_in) << graph;
    }
    EXPECT_EQ(header_of(layout).by_out.splits > 0, by_out) << graph;
  }
}

}  // namespace
}  // namespace blocksparse::linear
