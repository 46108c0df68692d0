// Which CUDA kernel does a weight gradient, and how.
#include <gtest/gtest.h>

#include "gemm/cuda/select.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"

namespace blocksparse::gemm {
namespace {

constexpr cuda::Card kH200 = {.arch = 90, .multiprocessors = 132, .shared_bytes = 227 * 1024, .sm90a = true};

TEST(SelectCuda, GradientsOfFewTokensHaveOneToo) {
  const CudaProblem p{
      .pass = Pass::wgrad, .dtype = DType::bf16, .block = 32, .n = 32, .inputs = 4096, .outputs = 4096, .blocks = 1600};
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, {.arch = 80, .multiprocessors = 108});
  };
  EXPECT_EQ(but([](CudaProblem&) {}), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 1023; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true, o.x_in_rows = false, o.pairs = 9; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::few) << "dW element by element";
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 4093; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 0; }), CudaKernel::generic);
  EXPECT_NE(but([](CudaProblem& o) { o.n = most_few_gradient_tokens(o) + 1; }), CudaKernel::few);
  EXPECT_EQ(but([](CudaProblem& o) { o.dtype = DType::f32; }), CudaKernel::tiled);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = int64_t{1} << 25; }), CudaKernel::generic) << "offsets of 32 bits";
  EXPECT_EQ(choose_cuda_kernel(p, kH200), CudaKernel::few);
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
    return choose_cuda_kernel(p, card);
  };
  EXPECT_EQ(choice(8, 1024, 0.01), CudaKernel::few);
  EXPECT_EQ(choice(8, 1024, 0.1), CudaKernel::regions);
  EXPECT_EQ(choice(8, 1024, 0.25), CudaKernel::many);
  EXPECT_EQ(choice(16, 2000, 0.03), CudaKernel::few);
  EXPECT_EQ(choice(16, 2000, 0.1), CudaKernel::regions);
  EXPECT_EQ(choice(16, 2000, 0.5), CudaKernel::many);
  EXPECT_EQ(choice(32, 2000, 0.1), CudaKernel::few);
  EXPECT_EQ(choice(32, 2000, 0.25), CudaKernel::regions);
  EXPECT_NE(choice(32, 1024, 0.5), CudaKernel::few);
  EXPECT_NE(choice(32, 2048, 0.1), CudaKernel::few);
  EXPECT_EQ(choice(64, 1023, 0.1), CudaKernel::few);
  EXPECT_EQ(choice(64, 1024, 0.1), CudaKernel::many);
  // Where `regions` is not what it is measured against.
  constexpr bool kFirst = true;
  EXPECT_EQ(choice(8, 1024, 0.05, kFirst), CudaKernel::few);
  EXPECT_EQ(choice(16, 1024, 0.15, kFirst), CudaKernel::few);
  EXPECT_EQ(choice(32, 1024, 0.25, kFirst), CudaKernel::few);
  EXPECT_EQ(choice(16, 1024, 0.25, kFirst), CudaKernel::many);
  const cuda::Card a100{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024};
  EXPECT_EQ(choice(16, 1024, 0.03, false, a100), CudaKernel::few);
  EXPECT_EQ(choice(16, 1024, 0.15, false, a100), CudaKernel::regions);
}

TEST(SelectCuda, GradientsOfFewTokensArePlannedBySizes) {
  CudaProblem p{.pass = Pass::wgrad, .dtype = DType::bf16, .block = 128, .n = 33, .inputs = 500, .outputs = 1000};
  p.blocks = 9;
  const FewGradientPlan plan = plan_few_gradient(p);
  EXPECT_EQ(plan.unit, 32);
  EXPECT_EQ(plan.units, 9 * 16);
  EXPECT_EQ(plan.input_units, 16);
  EXPECT_EQ(plan.output_units, 32);
  EXPECT_EQ(plan.packed_bytes, 48 * 32 * 64 * 2) << "two chunks of 32 tokens";
  EXPECT_GE(cuda_workspace_bytes(p), static_cast<size_t>(plan.packed_bytes + plan.units * 4));
  for (int64_t n = 1; n <= most_few_gradient_tokens(p); ++n) {  // pairs of a token each: 64 are packed at a time
    p.n = n;
    EXPECT_GE(plan_few_gradient(p).packed_bytes, 48 * 32 * 2 * 32 * (n / 64 * 2 + (n % 64 + 31) / 32));
  }
  p.n = 64, p.dtype = DType::f32;
  EXPECT_EQ(plan_few_gradient(p).packed_bytes, 48 * 32 * 64 * 4) << "four chunks of 16";
  EXPECT_EQ(few_gradient_split(2000, 16, kH200), 1);
  EXPECT_EQ(few_gradient_split(1000, 16, kH200), 2);
  EXPECT_EQ(few_gradient_split(100, 16, kH200), 4);
  EXPECT_EQ(few_gradient_split(100, 3, kH200), 2) << "no more than there are chunks";
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
  EXPECT_EQ(at_once(32, 40, 200, DType::f32, kH200), kMostManyTerms);
  EXPECT_EQ(at_once(32, 40, 100, DType::f32, kH200), kMostTerms) << "short ones";
  EXPECT_EQ(at_once(32, 40, 200, DType::bf16, kH200), kMostTerms) << "dW would be rounded between";
  EXPECT_EQ(at_once(32, 12, 200, DType::bf16, kH200), kMostManyTerms);
  EXPECT_EQ(at_once(16, 12, 200, DType::f32, kH200), kMostTerms);
  EXPECT_EQ(at_once(16, 12, 2000, DType::f32, kH200), kMostManyTerms);
  EXPECT_EQ(at_once(32, 40, 200, DType::f32, a100), kMostTerms);
  EXPECT_EQ(at_once(32, 40, 2000, DType::f32, a100), 1) << "which regions take";
  EXPECT_EQ(at_once(32, 40, 2000, DType::bf16, a100), kMostTerms);
  blocks = 5000;  // 2 % of b = 8
  EXPECT_EQ(at_once(8, 8, 4096, DType::f32, kH200), 1) << "regions are twice as fast";
  EXPECT_EQ(at_once(16, 8, 4096, DType::f32, kH200), 1);
  EXPECT_EQ(at_once(8, 8, 4096, DType::bf16, kH200), kMostManyTerms) << "but would round dW between";
  blocks = 60000;
  EXPECT_EQ(at_once(8, 8, 4096, DType::f32, kH200), kMostManyTerms);
  in_rows = false, blocks = 1600;
  EXPECT_EQ(at_once(32, 1000, 200, DType::f32, kH200), kMostTerms) << "which many does not do: one launch, not 84";
  EXPECT_EQ(at_once(32, 40, 4000, DType::f32, kH200), kMostTerms) << "nor does another than the generic kernel";
}

TEST(SelectCuda, GradientsOfManyTokensHaveOneToo) {
  const CudaProblem p{.pass = Pass::wgrad,
                      .dtype = DType::f16,
                      .block = 16,
                      .n = 4096,
                      .inputs = 4093,
                      .outputs = 4091,
                      .blocks = 6000};
  EXPECT_EQ(choose_cuda_kernel(p, kH200), CudaKernel::regions);
  const auto but = [&p](auto change) {
    CudaProblem other = p;
    change(other);
    return choose_cuda_kernel(other, kH200);
  };
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true; }), CudaKernel::regions) << "the gates' gradient";
  EXPECT_EQ(but([](CudaProblem& o) { o.gated = true, o.blocks = 60000; }), CudaKernel::many) << "too large for sums";
  EXPECT_EQ(but([](CudaProblem& o) { o.x_first = true; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 64, o.blocks = 400; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.inputs = o.outputs = 500, o.blocks = 300; }), CudaKernel::many) << "a small dW";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 800; }), CudaKernel::many) << "few cells hold a block";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 1600; }), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 6000; }), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.blocks = 7000; }), CudaKernel::many) << "most cells do";
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 600; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 1300; }), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 20000; }), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.blocks = 23000; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 52000; }), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 8, o.blocks = 60000; }), CudaKernel::many);
  EXPECT_EQ(choose_cuda_kernel(p, {.arch = 80, .multiprocessors = 108}), CudaKernel::regions);
  EXPECT_EQ(but([](CudaProblem& o) { o.pairs = 2; }), CudaKernel::many) << "regions take no lists";
  EXPECT_EQ(but([](CudaProblem& o) { o.pairs = 5; }), CudaKernel::generic) << "short ones";
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.pairs = 12; }), CudaKernel::many);
  EXPECT_EQ(but([](CudaProblem& o) { o.block = 32, o.pairs = 13; }), CudaKernel::generic);
  const auto takes = [&p](int64_t pairs) {
    CudaProblem other = p;
    other.pairs = pairs;
    return cuda_supports(CudaKernel::many, other, kH200);
  };
  EXPECT_TRUE(takes(2) && takes(kMostManyTerms));
  EXPECT_FALSE(takes(kMostManyTerms + 1));
  EXPECT_EQ(but([](CudaProblem& o) { o.w_aligned = false; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.x_in_rows = false; }), CudaKernel::generic);
  EXPECT_EQ(but([](CudaProblem& o) { o.n = 512; }), CudaKernel::few);
  const ManyGradientPlan plan = plan_many_gradient(p);
  EXPECT_EQ(plan.strips, 64);
  EXPECT_EQ(plan.chunks, 128);
  EXPECT_EQ(plan.cells, 6000) << "no more than blocks";
  CudaProblem many = p;
  many.blocks = 16000;
  const ManyGradientPlan wide = plan_many_gradient(many);
  EXPECT_EQ(wide.strips, 32) << "of 128 outputs";
  EXPECT_EQ(wide.chunks, 64);
  EXPECT_EQ(wide.cells, 32 * 64);
  EXPECT_GE(wide.units, wide.strips * (wide.chunks / 2)) << "there may be units of two cells";
  many.outputs = 60, many.blocks = 1000;
  EXPECT_EQ(plan_many_gradient(many).strips, 1);
  EXPECT_EQ(plan_many_gradient(many).chunks, 128) << "half of 128 outputs would be for nothing";
  EXPECT_GE(cuda_workspace_bytes(p), static_cast<size_t>(2 * kMostGradientGrid * gradient_form_of(p).part_bytes));
}

// A plan is made for layouts without blocks as well, and never for more units than there are columns.
TEST(SelectCuda, RegionsOfOddLayouts) {
  CudaProblem p{.pass = Pass::wgrad, .dtype = DType::bf16, .block = 8, .n = 4096, .inputs = 4096, .outputs = 4096};
  const RegionPlan empty = plan_regions(p, kH200);
  EXPECT_GE(empty.strips * empty.strip_rows, 512);
  EXPECT_GE(empty.units, 1);
  p.inputs = 24, p.blocks = 700;
  EXPECT_LE(plan_regions(p, kH200).units, 3);
  p.inputs = 4096, p.blocks = 26000;
  EXPECT_GT(plan_regions(p, kH200).stages, kLeastRegionStages);
  p.uneven = true;
  EXPECT_EQ(plan_regions(p, kH200).stages, kLeastRegionStages) << "the room of long rows' units";
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
    const RegionPlan plan = plan_regions(p, kH200);
    const int32_t thread_blocks = plan.strips * plan.units * plan.slices;
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
          const int64_t side = (features + block - 1) / block;
          const auto blocks = static_cast<int64_t>(density * static_cast<double>(side * side));
          const CudaProblem p{.pass = Pass::wgrad,
                              .dtype = DType::f16,
                              .block = block,
                              .n = 4096,
                              .inputs = features,
                              .outputs = features,
                              .blocks = blocks};
          const RegionPlan plan = plan_regions(p, card);
          SCOPED_TRACE(testing::Message()
                       << "b=" << block << " " << features << " density " << density << " sm_" << card.arch);
          ASSERT_TRUE(regions_support(p));
          EXPECT_GE(plan.strips * plan.strip_rows, side);
          EXPECT_LT((plan.strips - 1) * plan.strip_rows, side) << "a strip without rows";
          EXPECT_LE(plan.strip_rows, kMostStripRows);
          EXPECT_LE(std::max<int64_t>(plan.units, (side + plan.most_columns - 1) / plan.most_columns), kMostStripUnits);
          EXPECT_LE(region_dy_boxes(plan.strip_rows, block) + region_boxes(plan.most_columns, block), plan.boxes);
          EXPECT_LE(region_dy_boxes(plan.strip_rows, block), kMostDyBoxes);
          EXPECT_GE(plan.stages, kLeastRegionStages);
          EXPECT_LE(plan.stages, card.sm90a ? kMostRegionStages : kLeastRegionStages) << "as its kernel has";
          EXPECT_LE(plan.stages * plan.boxes * kRegionBoxBytes, card.shared_bytes - 2048);
          EXPECT_LE(region_places(p).partial + plan.slices * blocks * block * block * 4 * (plan.slices > 1),
                    region_places(p).end);
        }
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
