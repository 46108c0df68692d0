// The choice of CPU kernels, and how they do a call: each test covers both sides of a threshold. plan_lines_test.cc has
// whole plans.
#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "core/text.h"
#include "cpu/isa.h"
#include "gemm/cpu/kernels.h"
#include "gemm/cpu/plan.h"
#include "gemm/test/machines.h"

namespace blocksparse::gemm {
namespace {

#if defined(__x86_64__)
constexpr Isa kIsasOfThisBuild[] = {Isa::scalar, Isa::avx2, Isa::avx512};
constexpr Isa kBf16IsasOfThisBuild[] = {Isa::avx512_bf16, Isa::amx};
constexpr Isa kBelowBf16 = Isa::avx512;
#elif defined(__aarch64__)
constexpr Isa kIsasOfThisBuild[] = {Isa::scalar, Isa::neon};
constexpr Isa kBf16IsasOfThisBuild[] = {Isa::neon_bf16};
constexpr Isa kBelowBf16 = Isa::neon;
#else
constexpr Isa kIsasOfThisBuild[] = {Isa::scalar};
constexpr std::array<Isa, 0> kBf16IsasOfThisBuild = {};
constexpr Isa kBelowBf16 = Isa::scalar;
#endif

TEST(Select, EveryKernelIsRegisteredOnce) {
  for (Isa isa : kIsasOfThisBuild) {
    for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      int products = 0, gradients = 0;
      for (const ProductKernel& k : product_kernels()) products += k.isa == isa && k.dtype == dtype;
      for (const GradientKernel& k : gradient_kernels()) gradients += k.isa == isa && k.dtype == dtype;
      EXPECT_EQ(products, 1) << name_of(isa) << name_of(dtype);
      EXPECT_EQ(gradients, 1) << name_of(isa) << name_of(dtype);
    }
  }
}

TEST(Select, TypesThatAnInstructionSetLacksAreDoneByTheNextBelow) {
  for (Isa isa : kBf16IsasOfThisBuild) {
    for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
      const Isa expected = dtype == DType::bf16 ? isa : kBelowBf16;
      ASSERT_NE(find_product_kernel(isa, dtype), nullptr);
      EXPECT_EQ(find_product_kernel(isa, dtype)->isa, expected) << name_of(isa) << name_of(dtype);
      EXPECT_EQ(find_gradient_kernel(isa, dtype)->isa, expected) << name_of(isa) << name_of(dtype);
    }
  }
  EXPECT_EQ(find_product_kernel(Isa::reference, DType::f32), nullptr) << "which is no kernel";
}

TEST(Select, PlansOfOtherMachinesSeeTheKernelsOfThisOne) {
  for (const ProductKernel& k : product_kernels()) {
    const ProductTraits t = traits_of(k), usual = usual_traits(k.dtype, k.isa);
    const auto what = concat(name_of(k.isa), " ", name_of(k.dtype));
    EXPECT_EQ(t.lanes, usual.lanes) << what;
    EXPECT_EQ(t.by_token, usual.by_token) << what;
    EXPECT_EQ(t.side_by_side, usual.side_by_side) << what;
    EXPECT_EQ(t.stages, usual.stages) << what;
    EXPECT_EQ(t.along_outputs, usual.along_outputs) << what;
    EXPECT_EQ(t.lanes, find_gradient_kernel(k.isa, k.dtype)->lanes) << what;
  }
}

CpuPlan plan(const CpuProblem& p, const Cpu& cpu = kZen5) { return plan_product(p, cpu); }

TEST(Select, RoundsFitTheCacheAndHoldWholeGroups) {
  CpuProblem p{.dtype = DType::f32, .block = 32, .n = 100000, .inputs = 1024, .outputs = 1024};
  EXPECT_EQ(plan(p).round, 1024);
  p.inputs = 131072;
  EXPECT_EQ(plan(p).round, 64) << "never less than a group";
  p.n = 5;
  EXPECT_EQ(plan(p).round, 16) << "one vector of the widest instruction set";
  p.n = 0;
  EXPECT_EQ(plan(p).round, 0);
  p = {.dtype = DType::f64, .block = 8, .n = 70, .inputs = 64, .outputs = 64};
  EXPECT_EQ(plan(p).whole.group, 32);
}

TEST(Select, ThreadsTakeGroupsOfTokensWhereTheyComeOutEven) {
  constexpr int64_t kSmall = 400 << 10, kLarge = 4 << 20;  // bytes of W
  const auto alone = [](int64_t tokens, bool packed, int64_t weight_bytes, int32_t threads) -> int64_t {
    const CpuProblem p{.block = 64,
                       .n = tokens,
                       .inputs = 1024,
                       .outputs = 1024,
                       .blocks = weight_bytes / (64 * 64 * 4),
                       .x_feature = packed ? 1 : tokens + 1,  // no multiple of 1 KB apart
                       .threads = threads};
    const RoundPlan round = plan(p).whole;
    return round.by_group ? round.group : 0;
  };
  EXPECT_EQ(alone(64, true, kLarge, 1), 64);
  EXPECT_EQ(alone(512, true, kLarge, 2), 64);
  EXPECT_EQ(alone(64, true, kSmall, 2), 32);
  EXPECT_EQ(alone(64, true, kLarge, 2), 0) << "weights are read by one thread each";
  EXPECT_EQ(alone(64, false, kSmall, 2), 0) << "half a group is a loss where x is read in place";
  EXPECT_EQ(alone(192, true, kSmall, 2), 32) << "3 groups are not shared evenly by 2, 6 are";
  EXPECT_EQ(alone(576, true, kLarge, 2), 64) << "9 groups nearly are";
  EXPECT_EQ(alone(512, true, kSmall, 64), 0);
}

TEST(Select, TheLastRoundIsSharedByItself) {
  const CpuPlan p = plan(product_on(kZen5, "linear:fprop f32 n=1056 b=8 random(128,0.10) threads=2"));
  EXPECT_EQ(p.round, 1024);
  EXPECT_EQ(p.whole.group, 64);
  EXPECT_EQ(p.last.group, 64);
  EXPECT_TRUE(p.whole.by_group);
  EXPECT_FALSE(p.last.by_group) << "32 tokens are one group";
}

TEST(Select, SumsOfNarrowBlocksWaitForTheirRows) {
  CpuProblem p{.dtype = DType::f32,
               .block = 32,
               .n = 512,
               .inputs = 1024,
               .outputs = 1000,
               .y_token = 1000,
               .kernel = usual_traits(DType::f32, Isa::neon)};
  EXPECT_EQ(plan(p).staged_tokens, 512);
  EXPECT_EQ(plan(p).staged_bytes, 512u * 1024 * 4) << "whole runs of outputs";
  p.outputs = 131072;
  EXPECT_EQ(plan(p).staged_tokens, 64) << "never less than a group";
  p.block = 64;
  EXPECT_EQ(plan(p).staged_bytes, 0u);
  p = {.dtype = DType::bf16, .block = 32, .n = 512, .inputs = 1024, .outputs = 1024, .y_token = 1024};
  p.kernel = usual_traits(DType::bf16, Isa::neon);
  EXPECT_EQ(plan(p).staged_tokens, 0);
  p.block = 8;
  EXPECT_EQ(plan(p).staged_tokens, 512);
  p.y_feature = 512;
  EXPECT_EQ(plan(p).staged_tokens, 0) << "features-first y";
  p.y_feature = 1;
  p.kernel.stages = false;
  EXPECT_EQ(plan(p).staged_tokens, 0);
}

TEST(Select, ReadsInPlaceWhereRowsDoNotCollideInTheCache) {
  CpuProblem p{.dtype = DType::f32, .n = 64, .inputs = 1024, .outputs = 1024, .x_feature = 64};
  EXPECT_FALSE(plan(p).packed);
  p.kernel.side_by_side = true;
  p.blocks = 512;
  EXPECT_TRUE(plan(p).packed) << "each input meets 512 outputs";
  p.blocks = 102;
  EXPECT_FALSE(plan(p).packed);
  p.x_feature = 512;
  EXPECT_TRUE(plan(p).packed) << "2048 bytes apart: few sets of the cache";
  p.x_feature = 500;
  EXPECT_FALSE(plan(p).packed);
  p.dtype = DType::bf16;
  EXPECT_TRUE(plan(p).packed) << "bf16 is widened when it is packed";
  p.dtype = DType::f32;
  p.x_feature = 1;
  EXPECT_TRUE(plan(p).packed);
}

bool along(const CpuProblem& p, const Cpu& cpu) { return plan_product(p, cpu).form == ProductForm::along_outputs; }
bool along(std::string_view line, const Cpu& cpu) { return along(product_on(cpu, line), cpu); }
bool packs(std::string_view line, const Cpu& cpu) { return plan_product(product_on(cpu, line), cpu).packed; }

TEST(Select, IntelsCpusAreTreatedOtherwise) {
  constexpr std::string_view kOneVector = "linear:fprop f32 n=64 b=16 random(64,0.1)";
  constexpr std::string_view kRowsOf16KB = "linear:dgrad f32 n=64 b=32 random(128,0.1)";
  EXPECT_TRUE(along(kOneVector, kXeon));
  EXPECT_FALSE(along(kOneVector, kZen5)) << "a load for each product";
  EXPECT_TRUE(along(kOneVector, kZen3)) << "two vectors";
  EXPECT_TRUE(packs(kOneVector, kXeon));
  EXPECT_TRUE(along(kRowsOf16KB, kXeon));
  EXPECT_FALSE(along(kRowsOf16KB, kZen5));
  EXPECT_TRUE(packs(kRowsOf16KB, kXeon));

  const auto copies_dy = [](const Cpu& cpu) {
    return plan_gradient(gradient_on(cpu, "linear:wgrad f32 n=64 b=32 random(32,0.02)"), cpu).copies_dy;
  };
  constexpr Cpu kIntelAvx2{.avx2 = true, .intel = true};
  EXPECT_TRUE(copies_dy(kXeon));
  EXPECT_FALSE(copies_dy(kIntelAvx2)) << "AVX2 packs it";
  EXPECT_FALSE(copies_dy(kZen5));

  const auto asks_again = [](const Cpu& cpu, std::string_view line) {
    return plan_product(product_on(cpu, line), cpu).asks_again;
  };
  EXPECT_TRUE(asks_again(kZen5, "linear:dgrad f32 n=64 b=8 random(128,0.1)"));
  EXPECT_FALSE(asks_again(kXeon, "linear:dgrad f32 n=64 b=8 random(128,0.1)"));
  EXPECT_FALSE(asks_again(kZen5, "linear:fprop f32 n=64 b=8 random(128,0.1)")) << "rows of W follow one another";

  const auto unasked = [](const Cpu& cpu, std::string_view line) {
    return plan_product(product_on(cpu, line), cpu).large_unasked;
  };
  EXPECT_TRUE(unasked(kXeon, "linear:fprop f32 n=1 b=32 random(32,0.1)"));
  EXPECT_FALSE(unasked(kXeon, "linear:fprop f32 n=1 b=16 random(64,0.1)"));
  EXPECT_FALSE(unasked(kZen5, "linear:fprop f32 n=1 b=32 random(32,0.1)"));
  EXPECT_FALSE(unasked(kIntelAvx2, "linear:fprop f32 n=1 b=32 random(32,0.1)")) << "not measured";
}

TEST(Select, VectorsRunAlongOutputsWhereBlocksHoldSome) {
  const CpuProblem fprop = product_on(kZen5, "linear:fprop f32 n=64 b=32 random(32,0.1)");
  EXPECT_TRUE(along(fprop, kZen5));
  CpuProblem other = fprop;
  other.kernel.along_outputs = 64;
  EXPECT_FALSE(along(other, kZen5)) << "blocks of one vector";
  other.kernel.along_outputs = 0;
  EXPECT_FALSE(along(other, kZen5)) << "no such kernel";
  EXPECT_FALSE(along("linear:fprop f32 n=15 b=32 random(32,0.1)", kZen5));
  EXPECT_FALSE(along("linear:fprop f32 n=64 b=32 dense(32)", kZen5)) << "W would be copied for too few tokens";
  EXPECT_TRUE(along("linear:dgrad f32 n=64 b=32 dense(32)", kZen5)) << "dgrad reads W where it lies";
  EXPECT_FALSE(along("linear:fprop f32 n=64 b=32 random(32,0.1) gates", kZen5));
  EXPECT_FALSE(along("linear:fprop f32 n=64 b=32 random(32,0.1) y=first", kZen5));
  EXPECT_TRUE(along("linear:fprop bf16 n=64 b=32 random(32,0.1)", kZen5));
  EXPECT_FALSE(along("linear:fprop bf16 n=64 b=32 random(32,0.1) in=1023", kZen5)) << "half a pair";
  EXPECT_TRUE(packs("linear:fprop f32 n=65 b=32 random(32,0.1)", kZen3));
  EXPECT_FALSE(packs("linear:fprop f32 n=64 b=32 random(32,0.1)", kZen3)) << "b = 32: even";
  EXPECT_FALSE(packs("linear:fprop f32 n=512 b=16 random(64,0.02)", kZen3)) << "the copy is used by too few outputs";
  EXPECT_TRUE(packs("linear:dgrad f32 n=64 b=16 dense(64)", kZen3));
  other = fprop;
  other.n = 512;
  EXPECT_EQ(plan(other).whole.group, 128);
  other.inputs = 4096;
  EXPECT_EQ(plan(other).whole.group, 64) << "x of a group is to stay in L2";
}

TEST(Select, TilesTakeMoreTokensWhereThatPays) {
  const auto group = [](std::string_view line) { return plan(product_on(kXeonAmx, line), kXeonAmx).whole.group; };
  EXPECT_EQ(group("linear:fprop bf16 n=512 b=64 random(16,0.5)"), 128);
  EXPECT_EQ(group("linear:fprop bf16 n=112 b=64 random(16,0.5)"), 64);
  EXPECT_EQ(group("linear:fprop bf16 n=512 b=32 random(16,0.5)"), 128);
  EXPECT_EQ(group("linear:fprop bf16 n=512 b=32 random(16,0.1)"), 64) << "short lists";
  EXPECT_EQ(group("linear:fprop bf16 n=512 b=16 random(16,0.5)"), 64) << "W is copied in small parts";
}

TEST(Select, GradientsOfLargeBlocksAreSummedAFewTokensAtATime) {
  const auto round = [](std::string_view line, const Cpu& cpu) {
    return plan_gradient(gradient_on(cpu, line), cpu).round;
  };
  EXPECT_EQ(round("linear:wgrad f32 n=512 b=32 random(8,0.9)", kZen3), 64);
  EXPECT_EQ(round("linear:wgrad f32 n=512 b=16 random(8,0.9)", kZen3), 512);
  EXPECT_EQ(round("linear:wgrad f32 n=512 b=32 random(8,0.9) x=first y=first", kZen3), 512);
  EXPECT_EQ(round("linear:wgrad bf16 n=512 b=32 random(8,0.9)", kZen3), 512) << "sums would be narrowed each time";
  EXPECT_EQ(round("linear:wgrad bf16 n=512 b=32 random(8,0.9) dw=f32", kZen3), 64);
  EXPECT_EQ(round("linear:wgrad f32 n=512 b=32 random(64,0.9)", kZen5), 512);
}

TEST(Select, NarrowGradientsOfSeveralRoundsAreSummedWide) {
  CpuGradientProblem p{.dtype = DType::bf16, .dw_dtype = DType::bf16, .n = 100, .inputs = 256, .outputs = 256};
  p.blocks = 10;
  EXPECT_EQ(plan_gradient(p, kZen5).sums_bytes, 0u);
  p.n = 5000;
  EXPECT_EQ(plan_gradient(p, kZen5).sums_bytes, 10u * 32 * 32 * 4);
  p.dw_dtype = DType::f32;
  EXPECT_EQ(plan_gradient(p, kZen5).sums_bytes, 0u);
}

}  // namespace
}  // namespace blocksparse::gemm
