// Which CUDA kernel does a weight gradient, and how.
#include <gtest/gtest.h>

#include "core/ceil_div.h"
#include "gemm/cuda/families.h"
#include "gemm/cuda/generic/plan.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"
#include "gemm/cuda/wgrad_stream/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm {
namespace {

std::string_view chosen(const CudaProblem& p, const cuda::Card& card) { return choose_family(p, card).name; }

constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};

TEST(SelectCuda, GradientsOfFewTokensHaveOneToo) {
  const CudaProblem p{
      .pass = Pass::wgrad, .dtype = DType::bf16, .block = 32, .n = 32, .inputs = 4096, .outputs = 4096, .blocks = 1600};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, {.arch = 80, .multiprocessors = 108});
  };
  EXPECT_EQ(but([](CudaProblem&) {}), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1023; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true, o.x_in_rows = false, o.pairs = 9; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "wgrad_stream") << "dW element by element";
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 4093; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 0; }), "generic");
  EXPECT_NE(but([](CudaProblem& o) { o.n = wgrad_stream::most_tokens(o) + 1; }), "wgrad_stream");
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), "tiled_f32");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = int64_t{1} << 25; }), "generic") << "offsets of 32 bits";
  EXPECT_EQ(chosen(p, kH200), "wgrad_stream");
}

TEST(SelectCuda, GradientsOfSomeThousandTokensAreChosenByDensity) {
  const auto choice = [](int32_t block, int64_t n, double density, bool x_first = false,
                         const cuda::Card& card = kH200) {
    const int64_t side = 4096 / block;
    const CudaProblem p{.pass = Pass::wgrad,
                        .dtype = DType::bf16,
                        .block = block,
                        .n = n,
                        .inputs = 4096,
                        .outputs = 4096,
                        .blocks = static_cast<int64_t>(density * static_cast<double>(side * side)),
                        .x_first = x_first};
    return chosen(p, card);
  };
  EXPECT_EQ(choice(8, 512, 0.02), "wgrad_stream");
  EXPECT_EQ(choice(8, 512, 0.05), "wgrad_in_registers");
  EXPECT_EQ(choice(8, 511, 0.05), "wgrad_stream");
  EXPECT_EQ(choice(8, 1024, 0.009), "wgrad_stream");
  EXPECT_EQ(choice(8, 1024, 0.25), "wgrad_in_registers");
  EXPECT_EQ(choice(8, 2048, 0.25), "wgrad_wgmma");
  EXPECT_EQ(choice(16, 600, 0.05), "wgrad_stream");
  EXPECT_EQ(choice(16, 600, 0.25), "wgrad_in_registers");
  EXPECT_EQ(choice(16, 2000, 0.009), "wgrad_stream");
  EXPECT_EQ(choice(16, 2000, 0.1), "wgrad_in_registers");
  EXPECT_EQ(choice(16, 2000, 0.5), "wgrad_wgmma");
  EXPECT_EQ(choice(32, 2000, 0.1), "wgrad_stream");
  EXPECT_EQ(choice(32, 2000, 0.25), "wgrad_in_registers");
  EXPECT_NE(choice(32, 1024, 0.5), "wgrad_stream");
  EXPECT_NE(choice(32, 2048, 0.1), "wgrad_stream");
  EXPECT_EQ(choice(64, 1, 0.1), "wgrad_block");
  EXPECT_EQ(choice(64, 1024, 0.1), "wgrad_block");
  EXPECT_EQ(choice(64, 8192, 0.02), "wgrad_block");
  EXPECT_EQ(choice(64, 4096, 0.25), "wgrad_block");
  EXPECT_EQ(choice(64, 8192, 0.25), "wgrad_wgmma") << "more than L2 holds, for many blocks";
  EXPECT_EQ(choice(128, 8192, 0.02), "wgrad_wgmma") << "few blocks: tokens are cut";
  EXPECT_EQ(choice(64, 4096, 0.5), "wgrad_wgmma") << "nearly dense";
  EXPECT_EQ(choice(128, 4096, 0.5), "wgrad_block");
  EXPECT_NE(choice(32, 256, 0.1), "wgrad_block");
  // Where wgrad_block and wgrad_in_registers are not what they are measured against.
  constexpr bool kFirst = true;
  EXPECT_EQ(choice(64, 1023, 0.1, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(64, 1024, 0.1, kFirst), "wgrad_wgmma");
  EXPECT_EQ(choice(128, 512, 0.1, kFirst), "wgrad_wgmma");
  EXPECT_EQ(choice(128, 512, 0.02, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(128, 511, 0.1, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(8, 1024, 0.05, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(16, 1024, 0.15, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(32, 1024, 0.25, kFirst), "wgrad_stream");
  EXPECT_EQ(choice(16, 1024, 0.25, kFirst), "wgrad_wgmma");
  const cuda::Card a100{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024};
  EXPECT_EQ(choice(16, 1024, 0.009, false, a100), "wgrad_stream");
  EXPECT_EQ(choice(16, 600, 0.15, false, a100), "wgrad_stream") << "not measured there";
  EXPECT_EQ(choice(16, 1024, 0.15, false, a100), "wgrad_in_registers");
}

TEST(SelectCuda, GradientsOfFewTokensArePlannedBySizes) {
  CudaProblem p{.pass = Pass::wgrad, .dtype = DType::bf16, .block = 128, .n = 33, .inputs = 500, .outputs = 1000};
  p.blocks = 9;
  const wgrad_stream::Plan plan = wgrad_stream::plan_of(p);
  EXPECT_EQ(plan.patch, 32);
  EXPECT_EQ(plan.patches, 9 * 16);
  EXPECT_EQ(plan.input_patches, 16);
  EXPECT_EQ(plan.output_patches, 32);
  EXPECT_EQ(plan.packed_bytes, 48 * 32 * 64 * 2) << "two chunks of 32 tokens";
  EXPECT_GE(cuda_workspace_bytes(p), static_cast<size_t>(plan.packed_bytes + plan.patches * 4));
  for (int64_t n = 1; n <= wgrad_stream::most_tokens(p); ++n) {  // pairs of a token each: 64 are packed at a time
    p.n = n;
    EXPECT_GE(wgrad_stream::plan_of(p).packed_bytes, 48 * 32 * 2 * 32 * (n / 64 * 2 + (n % 64 + 31) / 32));
  }
  p.n = 64, p.dtype = DType::f32;
  EXPECT_EQ(wgrad_stream::plan_of(p).packed_bytes, 48 * 32 * 64 * 4) << "four chunks of 16";
  EXPECT_EQ(wgrad_stream::warps_of_tile(2000, 16, kH200), 1);
  EXPECT_EQ(wgrad_stream::warps_of_tile(1000, 16, kH200), 2);
  EXPECT_EQ(wgrad_stream::warps_of_tile(100, 16, kH200), 4);
  EXPECT_EQ(wgrad_stream::warps_of_tile(100, 3, kH200), 2) << "no more than there are chunks";
}

TEST(SelectCuda, ListsGoTogetherWhereThatIsFaster) {
  const cuda::Card a100{.arch = 80, .multiprocessors = 108};
  bool in_rows = true;
  int64_t blocks = 1600;
  const auto at_once = [&](int32_t block, int64_t pairs, int64_t tokens, DType dw, const cuda::Card& card) {
    return pairs_at_once({.pass = Pass::wgrad,
                          .dtype = DType::bf16,
                          .block = block,
                          .n = pairs * tokens,
                          .inputs = 4096,
                          .outputs = 4096,
                          .blocks = blocks,
                          .x_in_rows = in_rows,
                          .pairs = pairs},
                         dw, card);
  };
  EXPECT_EQ(at_once(32, 40, 200, DType::f32, kH200), wgrad_wgmma::kTermsOfLaunch);
  EXPECT_EQ(at_once(32, 40, 100, DType::f32, kH200), generic::kMostTerms) << "short ones";
  EXPECT_EQ(at_once(32, 40, 200, DType::bf16, kH200), generic::kMostTerms) << "dW would be rounded between";
  EXPECT_EQ(at_once(32, 12, 200, DType::bf16, kH200), wgrad_wgmma::kTermsOfLaunch);
  EXPECT_EQ(at_once(16, 12, 200, DType::f32, kH200), generic::kMostTerms);
  EXPECT_EQ(at_once(16, 12, 2000, DType::f32, kH200), 1) << "wgrad_in_registers takes one pair";
  EXPECT_EQ(at_once(32, 40, 200, DType::f32, a100), generic::kMostTerms);
  EXPECT_EQ(at_once(32, 40, 2000, DType::f32, a100), 1) << "which regions take";
  EXPECT_EQ(at_once(32, 40, 2000, DType::bf16, a100), generic::kMostTerms);
  blocks = 5000;  // 2 % of b = 8
  EXPECT_EQ(at_once(8, 8, 4096, DType::f32, kH200), 1) << "regions are twice as fast";
  EXPECT_EQ(at_once(16, 8, 4096, DType::f32, kH200), 1);
  EXPECT_EQ(at_once(8, 8, 4096, DType::bf16, kH200), wgrad_wgmma::kTermsOfLaunch) << "but would round dW between";
  blocks = 60000;
  EXPECT_EQ(at_once(8, 8, 4096, DType::f32, kH200), wgrad_wgmma::kTermsOfLaunch);
  in_rows = false, blocks = 1600;
  EXPECT_EQ(at_once(32, 1000, 200, DType::f32, kH200), generic::kMostTerms)
      << "which many does not do: one launch, not 84";
  EXPECT_EQ(at_once(32, 40, 4000, DType::f32, kH200), generic::kMostTerms)
      << "nor does another than the generic kernel";
}

TEST(SelectCuda, GradientsOfManyTokensHaveOneToo) {
  const CudaProblem p{.pass = Pass::wgrad,
                      .dtype = DType::f16,
                      .block = 16,
                      .n = 4096,
                      .inputs = 4093,
                      .outputs = 4091,
                      .blocks = 6000};
  EXPECT_EQ(chosen(p, kH200), "wgrad_in_registers");
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return chosen(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), "wgrad_in_registers") << "the gates' gradient";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true, o.blocks = 60000; }), "wgrad_wgmma") << "too large for sums";
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), "wgrad_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 64, o.blocks = 400; }), "wgrad_block");
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 440, o.blocks = 300; }), "wgrad_wgmma") << "a small dW";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 800; }), "wgrad_wgmma") << "few patches hold a block";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 1600; }), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 6000; }), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 7000; }), "wgrad_wgmma") << "most patches do";
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 600; }), "wgrad_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 1300; }), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 20000; }), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 23000; }), "wgrad_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 52000; }), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 60000; }), "wgrad_wgmma");
  EXPECT_EQ(chosen(p, {.arch = 80, .multiprocessors = 108}), "wgrad_in_registers");
  EXPECT_EQ(but([](CudaProblem& o) { o.pairs = 2; }), "wgrad_wgmma") << "regions take no lists";
  EXPECT_EQ(but([](CudaProblem& o) { o.pairs = 5; }), "generic") << "short ones";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.pairs = 12; }), "wgrad_wgmma");
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.pairs = 13; }), "generic");
  const auto takes = [&p](int64_t pairs) {
    CudaProblem other = p;
    other.pairs = pairs;
    return find_family("wgrad_wgmma")->takes(other, kH200);
  };
  EXPECT_TRUE(takes(2) && takes(wgrad_wgmma::kTermsOfLaunch));
  EXPECT_FALSE(takes(wgrad_wgmma::kTermsOfLaunch + 1));
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), "generic");
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 512; }), "wgrad_stream");
  const wgrad_wgmma::Plan plan = wgrad_wgmma::plan_of(p);
  EXPECT_EQ(plan.strips, 64);
  EXPECT_EQ(plan.chunks, 128);
  EXPECT_EQ(plan.patches, 6000) << "no more than blocks";
  CudaProblem many = p;
  many.blocks = 16000;
  const wgrad_wgmma::Plan wide = wgrad_wgmma::plan_of(many);
  EXPECT_EQ(wide.strips, 32) << "of 128 outputs";
  EXPECT_EQ(wide.chunks, 64);
  EXPECT_EQ(wide.patches, 32 * 64);
  EXPECT_GE(wide.jobs, wide.strips * (wide.chunks / 2)) << "there may be jobs of two patches";
  many.outputs = 60, many.blocks = 1000;
  EXPECT_EQ(wgrad_wgmma::plan_of(many).strips, 1);
  EXPECT_EQ(wgrad_wgmma::plan_of(many).chunks, 128) << "half of 128 outputs would be for nothing";
  EXPECT_GE(cuda_workspace_bytes(p),
            static_cast<size_t>(2 * wgrad_wgmma::kMostGrid * wgrad_wgmma::form_of(p).part_bytes));
}

// A plan is made for layouts without blocks as well, and never for more jobs than there are columns.
TEST(SelectCuda, RegionsOfOddLayouts) {
  CudaProblem p{.pass = Pass::wgrad, .dtype = DType::bf16, .block = 8, .n = 4096, .inputs = 4096, .outputs = 4096};
  const wgrad_in_registers::Plan empty = wgrad_in_registers::plan_of(p, kH200);
  EXPECT_GE(empty.strips * empty.strip_rows, 512);
  EXPECT_GE(empty.jobs, 1);
  p.inputs = 24, p.blocks = 700;
  EXPECT_LE(wgrad_in_registers::plan_of(p, kH200).jobs, 3);
  p.inputs = 4096, p.blocks = 26000;
  EXPECT_GT(wgrad_in_registers::plan_of(p, kH200).stages, wgrad_in_registers::kLeastStages);
  p.uneven = true;
  EXPECT_EQ(wgrad_in_registers::plan_of(p, kH200).stages, wgrad_in_registers::kLeastStages)
      << "the room of long rows' jobs";
}

TEST(SelectCuda, RegionsFillTheCard) {
  for (const int32_t block : {8, 16, 32}) {
    const int64_t side = 4096 / block;
    const CudaProblem p{.pass = Pass::wgrad,
                        .dtype = DType::bf16,
                        .block = block,
                        .n = 4096,
                        .inputs = 4096,
                        .outputs = 4096,
                        .blocks = side * side / 10};
    const wgrad_in_registers::Plan plan = wgrad_in_registers::plan_of(p, kH200);
    const int32_t thread_blocks = plan.strips * plan.jobs * plan.slices;
    EXPECT_LE(thread_blocks, 2 * kH200.multiprocessors) << "b=" << block;
    EXPECT_GE((thread_blocks - 1) % kH200.multiprocessors, kH200.multiprocessors * 4 / 5) << "the last round is full";
  }
}

TEST(SelectCuda, RegionsFitTheCard) {
  for (const int32_t block : {8, 16, 32, 64, 128}) {
    for (const double density : {0.01, 0.1, 0.5, 1.0}) {
      for (const int64_t features : {1000, 4096, 20000}) {
        for (const cuda::Card& card :
             {cuda::Card{.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true},
              cuda::Card{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024},
              cuda::Card{.arch = 86, .multiprocessors = 84}}) {
          const int64_t side = ceil_div(features, block);
          const auto blocks = static_cast<int64_t>(density * static_cast<double>(side * side));
          const CudaProblem p{.pass = Pass::wgrad,
                              .dtype = DType::f16,
                              .block = block,
                              .n = 4096,
                              .inputs = features,
                              .outputs = features,
                              .blocks = blocks};
          const wgrad_in_registers::Plan plan = wgrad_in_registers::plan_of(p, card);
          SCOPED_TRACE(testing::Message()
                       << "b=" << block << " " << features << " density " << density << " sm_" << card.arch);
          ASSERT_TRUE(wgrad_in_registers::supports(p));
          EXPECT_GE(plan.strips * plan.strip_rows, side);
          EXPECT_LT((plan.strips - 1) * plan.strip_rows, side) << "a strip without rows";
          EXPECT_LE(plan.strip_rows, wgrad_in_registers::kMostStripRows);
          EXPECT_LE(std::max<int64_t>(plan.jobs, ceil_div(side, plan.most_columns)),
                    wgrad_in_registers::kMostStripJobs);
          EXPECT_LE(wgrad_in_registers::dy_boxes_of(plan.strip_rows, block) +
                        wgrad_in_registers::boxes_of(plan.most_columns, block),
                    plan.boxes);
          EXPECT_LE(wgrad_in_registers::dy_boxes_of(plan.strip_rows, block), wgrad_in_registers::kMostDyBoxes);
          EXPECT_GE(plan.stages, wgrad_in_registers::kLeastStages);
          EXPECT_LE(plan.stages, card.sm90a ? wgrad_in_registers::kMostStages : wgrad_in_registers::kLeastStages)
              << "as its kernel has";
          EXPECT_LE(plan.stages * plan.boxes * wgrad_in_registers::kBoxBytes, card.shared_bytes - 2048);
          EXPECT_LE(wgrad_in_registers::workspace_places(p).partial +
                        plan.slices * blocks * block * block * 4 * (plan.slices > 1),
                    wgrad_in_registers::workspace_places(p).end);
        }
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
