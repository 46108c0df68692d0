// The choice of row_wgmma, its tiles, and which rows are dealt.
#include <gtest/gtest.h>

#include "core/ceil_div.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/row_wgmma/plan.h"

namespace blocksparse::gemm {
namespace {

constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .sm90a = true};

std::string_view chosen(const CudaProblem& p, const cuda::Card& card) { return choose_family(p, card).name; }

TEST(SelectCuda, SomeHundredTokensHaveOneOnHopper) {
  const CudaProblem p{.dtype = DType::bf16, .block = 32, .n = 256, .inputs = 5600, .outputs = 5600, .blocks = 1225};
  EXPECT_EQ(chosen(p, {.arch = 80, .multiprocessors = 108}), "stream_w");
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem&) {}), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.pass = Pass::dgrad; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.blocks = 3000; }), "stream_w") << "10 % of few rows";
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 65, o.inputs *= 2, o.outputs *= 2, o.blocks = 12000; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 64; }), "stream_w");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 128, o.blocks = 15000; }), "row_wgmma") << "half of the blocks";
  EXPECT_NE(but([](CudaProblem& o) { o.n = 128, o.blocks = 20000; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 512, o.blocks = 3000; }), "row_wgmma");
  EXPECT_NE(but([](CudaProblem& o) { o.n = 512, o.blocks = 6000; }), "row_wgmma") << "stream_x reads less";
  const auto many_rows = [&](int64_t inputs, double density) {
    return but([&](CudaProblem& o) {
      o.n = 256, o.inputs = inputs, o.outputs = 12288, o.blocks = static_cast<int64_t>(density * 384 * 384);
    });
  };
  EXPECT_EQ(many_rows(12288, 0.25), "stream_x");
  EXPECT_EQ(many_rows(12288, 0.1), "row_wgmma");
  EXPECT_EQ(many_rows(12285, 0.25), "row_wgmma") << "stream_x takes whole blocks of inputs";
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1024; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1024, o.blocks = 3000; }), "row_wgmma") << "10 %";
  EXPECT_NE(but([](CudaProblem& o) { o.n = 1024, o.blocks = 4000; }), "row_wgmma") << "13 %";
  EXPECT_NE(but([](CudaProblem& o) { o.n = 1024, o.inputs *= 2, o.outputs *= 2, o.blocks = 12000; }), "row_wgmma")
      << "10 % of many rows";
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1024, o.inputs = o.outputs = 992, o.blocks = 230; }), "row_wgmma")
      << "few rows";
  EXPECT_NE(but([](CudaProblem& o) { o.n = 2049; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.slots = 20; }), "row_wgmma") << "a hub";
  EXPECT_EQ(but([](CudaProblem& o) { o.outputs = 5599; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = 5599; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), "stream_w");
  EXPECT_NE(but([](CudaProblem& o) { o.w_aligned = false; }), "row_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), "stream_w") << "not measured";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "stream_w") << "not measured";
  for (int32_t block : {64, 128}) {
    const auto large = [&p, block](int64_t n, int64_t features, double density) {
      CudaProblem o = p;
      o.block = block, o.n = n, o.inputs = o.outputs = features;
      o.blocks = static_cast<int64_t>(density * static_cast<double>(o.output_blocks() * o.input_blocks()));
      return chosen(o, kH200);
    };
    EXPECT_EQ(large(64, 4096, 0.1), "row_wgmma");
    EXPECT_EQ(large(56, 4096, 0.1), block == 64 ? "row_wgmma" : "stream_w");
    EXPECT_EQ(large(64, 4096, 0.02), "stream_w");
    EXPECT_EQ(large(47, 4096, 0.25), "stream_w");
    EXPECT_EQ(large(65, 4096, 0.1), "row_wgmma");
    EXPECT_EQ(large(512, 12288, 0.25), "row_wgmma");
    EXPECT_EQ(large(1024, 4096, 0.25), "row_wgmma");
    EXPECT_EQ(large(1024, 12288, 0.1), "wgmma");
    EXPECT_EQ(large(1024, 18432, 0.03), "row_wgmma");
    EXPECT_EQ(large(1025, 4096, 0.1), "row_wgmma");
    EXPECT_EQ(large(2048, 4096, 0.1), "row_wgmma");
    EXPECT_EQ(large(2048, 4096, 0.25), block == 64 ? "wgmma" : "row_wgmma");
    EXPECT_EQ(large(2049, 4096, 0.1), "wgmma");
    EXPECT_EQ(large(2048, 12288, 0.1), "wgmma") << "x is larger than L2";
  }
  CudaProblem gates = p;
  gates.outputs = 4 * p.inputs;
  EXPECT_EQ(chosen(gates, kH200), "row_wgmma") << "each row has its own list";
  gates.quarters_are_alike = true;
  EXPECT_EQ(chosen(gates, kH200), "four_rows_wgmma");
  gates.n = 128;
  EXPECT_EQ(chosen(gates, kH200), "row_wgmma") << "x is read from L2 once more";
  gates.n = 512;
  EXPECT_EQ(chosen(gates, kH200), "four_rows_wgmma");
  gates.n = 513;
  EXPECT_EQ(chosen(gates, kH200), "row_wgmma");
  gates.n = 512, gates.inputs = 5599, gates.outputs = 4 * 5599;
  EXPECT_EQ(chosen(gates, kH200), "row_wgmma") << "W may hold anything there";
  gates.inputs = 5600, gates.outputs = 4 * 5600, gates.by_in = true;
  EXPECT_EQ(chosen(gates, kH200), "row_wgmma") << "W does not lie in the order of the lists";
  const CudaProblem small{.dtype = DType::bf16, .block = 64, .n = 128, .inputs = 4096, .outputs = 4096, .blocks = 410};
  CudaProblem wide = small;
  EXPECT_EQ(row_wgmma::tokens_of_tile(wide, kH200), 64);
  wide.n = 512;
  EXPECT_EQ(row_wgmma::tokens_of_tile(wide, kH200), 128) << "jobs for one and a half waves";
  wide.slots = 8;
  EXPECT_EQ(row_wgmma::tokens_of_tile(wide, kH200), 64) << "rows that differ much need more jobs to even out";
  wide.n = 1024, wide.inputs = 16448;
  EXPECT_TRUE(row_wgmma::takes_rows_inside(wide)) << "x is larger than L2 holds beside y";
  wide.slots = 0;
  EXPECT_FALSE(row_wgmma::takes_rows_inside(wide)) << "rows are of about equal length";
  EXPECT_NE(but([](CudaProblem& o) { o.dtype = DType::f32; }), "row_wgmma");
}

TEST(SelectCuda, RowsOfLayoutsWithHubsAreDealt) {
  const CudaProblem hubs{
      .dtype = DType::bf16, .block = 64, .n = 256, .inputs = 18432, .outputs = 18432, .blocks = 2448, .slots = 153};
  const auto dealt = [&](auto change, int32_t multiprocessors = 132) {
    CudaProblem p = hubs;
    change(p);
    const cuda::Card card{.arch = 90, .multiprocessors = multiprocessors};
    return row_wgmma::is_dealt(p, row_wgmma::tokens_of_tile(p, card), card);
  };
  EXPECT_TRUE(dealt([](CudaProblem&) {}));
  EXPECT_TRUE(dealt([](CudaProblem& p) { p.n = 512; }));
  EXPECT_TRUE(dealt([](CudaProblem& p) { p.n = 1024; })) << "8 tiles";
  EXPECT_FALSE(dealt([](CudaProblem& p) { p.n = 2048; })) << "x is larger than L2";
  EXPECT_FALSE(dealt([](CudaProblem& p) { p.n = 192; })) << "3 tiles";
  EXPECT_FALSE(dealt([](CudaProblem& p) { p.n = 64; })) << "slices are jobs of their own";
  EXPECT_FALSE(dealt([](CudaProblem& p) { p.slots = 0; }));
  EXPECT_FALSE(dealt([](CudaProblem& p) { p.block = 128; }));
  EXPECT_FALSE(dealt([](CudaProblem&) {}, 114)) << "another card's groups";
  CudaProblem small = hubs;
  small.block = 32, small.n = 128, small.blocks = 9792, small.slots = 502;
  EXPECT_EQ(row_wgmma::tokens_of_tile(small, kH200), 128) << "there are no kernels for dealt rows in tiles of 64";
  EXPECT_TRUE(row_wgmma::is_dealt(small, 128, kH200));
}

TEST(SelectCuda, ManyTokensOfLayoutsWithHubsAreSeveralLaunches) {
  const CudaProblem hubs{
      .dtype = DType::bf16, .block = 64, .n = 4096, .inputs = 18432, .outputs = 18432, .blocks = 2448, .slots = 153};
  const auto launches = [&](auto change) {
    CudaProblem p = hubs;
    change(p);
    return ceil_div(p.n, row_wgmma::tokens_of_launch(p));
  };
  EXPECT_EQ(chosen(hubs, kH200), "row_wgmma");
  CudaProblem few = hubs;
  few.n = 1100;
  EXPECT_EQ(chosen(few, kH200), "wgmma") << "76 tokens are not worth a launch";
  EXPECT_EQ(launches([](CudaProblem&) {}), 4);
  EXPECT_EQ(launches([](CudaProblem& p) { p.n = 1024; }), 1);
  EXPECT_EQ(launches([](CudaProblem& p) { p.block = 32, p.blocks = 9792; }), 8) << "1024 tokens of x are too large";
  EXPECT_EQ(launches([](CudaProblem& p) { p.block = 32, p.inputs = p.outputs = 12288, p.blocks = 6456; }), 4);
  EXPECT_EQ(launches([](CudaProblem& p) { p.slots = 0; }), 1) << "even rows";
  EXPECT_EQ(launches([](CudaProblem& p) { p.block = 128; }), 1) << "no kernels for dealt rows";
  EXPECT_EQ(launches([](CudaProblem& p) { p.blocks *= 2; }), 1) << "not measured";
  EXPECT_EQ(launches([](CudaProblem& p) { p.outputs = 16320; }), 1) << "not measured";
}

}  // namespace
}  // namespace blocksparse::gemm
