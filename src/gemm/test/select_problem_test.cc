// What is read off a call before a CUDA kernel is chosen, and what a view says of a layout without a look at its
// tables.
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "blocksparse/layout.h"
#include "core/index.h"
#include "gemm/cuda/families.h"

namespace blocksparse::gemm {
namespace {

// Pairs for a layer of 64 outputs and 96 inputs in bf16. Their memory is not read.
struct Pairs {
  alignas(16) char memory[16] = {};
  LayoutView layout{.block_size = 32, .out_features = 64, .in_features = 96, .blocks = 5};
  std::vector<GradPair> list;

  static ConstTensor tensor(const char* data, int64_t n, int64_t features, bool first) {
    ConstTensor t(data, DType::bf16, {n, features});
    if (first) t.stride[0] = 1, t.stride[1] = n;
    return t;
  }
  void add(int64_t n, bool x_first, bool dy_first, int64_t offset = 0) {
    list.push_back({tensor(memory + 2 * offset, n, 96, x_first), tensor(memory, n, 64, dy_first)});
  }
  CudaProblem problem(bool exchanged = false) const {
    return problem_of({.dtype = DType::bf16,
                       .dw_dtype = DType::f32,
                       .layout = layout,
                       .pairs = list,
                       .dw = const_cast<char*>(memory),
                       .exchanged = exchanged},
                      Math::ieee);
  }
};

TEST(CudaProblemOf, PairsOfOneOrder) {
  for (const bool first : {false, true}) {
    Pairs pairs;
    pairs.add(48, first, first);
    pairs.add(0, false, false);
    pairs.add(160, first, first);
    pairs.add(0, !first, !first);
    for (const bool exchanged : {false, true}) {
      const CudaProblem p = pairs.problem(exchanged);
      EXPECT_EQ(p.n, 208);
      EXPECT_EQ(p.pairs, 4);
      EXPECT_EQ(p.x_first, first) << "an empty pair has no order";
      EXPECT_TRUE(p.x_in_rows);
      EXPECT_TRUE(p.w_aligned);
    }
  }
}

TEST(CudaProblemOf, PairsOfSeveralOrdersAreNotInRows) {
  for (int odd = 0; odd < 3; ++odd) {
    for (const bool first : {false, true}) {
      Pairs pairs;
      for (int i = 0; i < 3; ++i) pairs.add(48, (i == odd) != first, (i == odd) != first);
      EXPECT_FALSE(pairs.problem().x_in_rows) << odd;
    }
  }
  Pairs pairs;
  pairs.add(48, false, true);
  EXPECT_FALSE(pairs.problem().x_in_rows);
}

TEST(CudaProblemOf, RowsBeginAtMultiplesOf16Bytes) {
  Pairs pairs;
  pairs.add(48, false, false);
  pairs.add(48, false, false, 1);
  EXPECT_FALSE(pairs.problem().x_in_rows);
  pairs.list.pop_back();
  EXPECT_TRUE(pairs.problem().x_in_rows);
  pairs.add(47, true, true);
  EXPECT_FALSE(pairs.problem().x_in_rows) << "rows of 94 bytes";
}

TEST(CudaProblemOf, NoPairs) {
  const CudaProblem p = Pairs().problem();
  EXPECT_EQ(p.n, 0);
  EXPECT_EQ(p.pairs, 0);
}

TEST(CudaProblemOf, Products) {
  alignas(16) const char memory[32] = {};
  Product p;
  p.dtype = DType::f32;
  p.layout = {.block_size = 32, .out_features = 64, .in_features = 96, .blocks = 5};
  p.x = {memory, 8, 96, 96, 1};
  p.w = memory;
  CudaProblem problem = problem_of(p, Math::tf32);
  EXPECT_TRUE(problem.w_aligned && problem.x_in_rows && problem.tf32);
  EXPECT_FALSE(problem.x_first || problem.gated || problem.by_in);
  p.by_in = true, p.w = memory + 4, p.gates = memory, p.x = {memory, 8, 64, 1, 8};
  problem = problem_of(p, Math::ieee);
  EXPECT_TRUE(problem.x_first && problem.gated && problem.by_in && problem.x_in_rows);
  EXPECT_FALSE(problem.w_aligned || problem.tf32);
  EXPECT_EQ(problem.inputs, 64);
  p.x.feature_stride = 7;
  EXPECT_FALSE(problem_of(p, Math::ieee).x_in_rows) << "rows that overlap";
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
}  // namespace blocksparse::gemm
