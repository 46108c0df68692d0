// The choice of CPU kernels, and how a call is divided.
#include <gtest/gtest.h>

#include <array>

#include "blocksparse/blocksparse.h"
#include "cpu/isa.h"
#include "gemm/cpu/kernels.h"
#include "gemm/cpu/plan.h"

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

TEST(Select, RoundsFitTheCacheAndHoldWholeGroups) {
  Problem p{.dtype = DType::f32, .block = 32, .n = 100000, .inputs = 1024, .outputs = 1024};
  EXPECT_EQ(plan_product(p).round, 1024);
  p.inputs = 131072;
  EXPECT_EQ(plan_product(p).round, 64) << "never less than a group";
  p.n = 5;
  EXPECT_EQ(plan_product(p).round, 16) << "one vector of the widest instruction set";
  p.n = 0;
  EXPECT_EQ(plan_product(p).round, 0);
  p = {.dtype = DType::f64, .block = 8, .n = 70, .inputs = 64, .outputs = 64};
  EXPECT_EQ(plan_product(p).group, 32);
}

TEST(Select, ThreadsTakeGroupsOfTokensWhereTheyComeOutEven) {
  constexpr int64_t kSmall = 400 << 10, kLarge = 4 << 20;
  const auto group = [](int64_t tokens, int64_t smallest, int64_t weight_bytes, int32_t threads) {
    return group_of_thread({tokens, 64, smallest, weight_bytes, threads});
  };
  EXPECT_EQ(group(64, 32, kLarge, 1), 64);
  EXPECT_EQ(group(512, 32, kLarge, 2), 64);
  EXPECT_EQ(group(64, 32, kSmall, 2), 32);
  EXPECT_EQ(group(64, 32, kLarge, 2), 0) << "weights are read by one thread each";
  EXPECT_EQ(group(64, 64, kSmall, 2), 0);
  EXPECT_EQ(group(192, 32, kSmall, 2), 32) << "3 groups are not shared evenly by 2, 6 are";
  EXPECT_EQ(group(576, 32, kLarge, 2), 64) << "9 groups nearly are";
  EXPECT_EQ(group(512, 32, kSmall, 64), 0);
}

TEST(Select, SumsOfNarrowBlocksWaitForTheirRows) {
  Problem p{.dtype = DType::f32, .block = 32, .n = 512, .inputs = 1024, .outputs = 1000};
  EXPECT_EQ(plan_product(p).staged_tokens, 512);
  EXPECT_EQ(plan_product(p).staged_bytes, 512u * 1024 * 4) << "whole runs of outputs";
  p.outputs = 131072;
  EXPECT_EQ(plan_product(p).staged_tokens, 64) << "never less than a group";
  p.block = 64;
  EXPECT_EQ(plan_product(p).staged_bytes, 0u);
  p = {.dtype = DType::bf16, .block = 32, .n = 512, .inputs = 1024, .outputs = 1024};
  EXPECT_EQ(plan_product(p).staged_tokens, 0);
  p.block = 8;
  EXPECT_EQ(plan_product(p).staged_tokens, 512);
}

TEST(Select, ReadsInPlaceWhereRowsDoNotCollideInTheCache) {
  Problem p{
      .dtype = DType::f32, .n = 64, .inputs = 1024, .outputs = 1024, .x_features_first = true, .x_feature_stride = 64};
  EXPECT_TRUE(plan_product(p).direct);
  p.side_by_side = true;
  p.weights = 1024 * 512;
  EXPECT_FALSE(plan_product(p).direct) << "each input meets 512 outputs";
  p.weights = 1024 * 102;
  EXPECT_TRUE(plan_product(p).direct);
  p.x_feature_stride = 512;
  EXPECT_FALSE(plan_product(p).direct) << "2048 bytes apart: few sets of the cache";
  p.x_feature_stride = 500;
  EXPECT_TRUE(plan_product(p).direct);
  p.dtype = DType::bf16;
  EXPECT_FALSE(plan_product(p).direct) << "bf16 is widened when it is packed";
  p.dtype = DType::f32;
  p.x_features_first = false;
  EXPECT_FALSE(plan_product(p).direct);
}

Product product_of(const Layout& layout, bool by_in, int64_t n) {
  const int64_t out = layout.out_features(), in = layout.in_features();
  const Activations wide{.n = n, .features = in, .token_stride = in, .feature_stride = 1};
  const Activations made{.n = n, .features = out, .token_stride = out, .feature_stride = 1};
  Product p;
  p.layout = layout.view();
  p.by_in = by_in;
  p.x = by_in ? made : wide;
  p.y = by_in ? wide : made;
  return p;
}

bool along(const Product& p, int32_t smallest) { return runs_along_outputs(p, smallest, 64, {}); }

TEST(Select, IntelsCpusAreTreatedOtherwise) {
  const Cpu amd{.avx512 = true}, intel{.avx512 = true, .intel = true};
  const auto layout = Layout::from_graph("random(64,0.1)", {.block_size = 16}, 0);
  const auto wide = Layout::from_graph("random(128,0.1)", {.block_size = 32}, 0);
  ASSERT_TRUE(layout.ok() && wide.ok());
  const Product one_vector = product_of(*layout, false, 64), rows_of_16_kb = product_of(*wide, true, 64);
  EXPECT_TRUE(runs_along_outputs(one_vector, 16, 64, intel));
  EXPECT_FALSE(runs_along_outputs(one_vector, 16, 64, amd)) << "a load for each product";
  EXPECT_TRUE(runs_along_outputs(one_vector, 16, 32, amd)) << "two vectors";
  EXPECT_TRUE(packs_tokens(one_vector, 64));
  EXPECT_TRUE(runs_along_outputs(rows_of_16_kb, 16, 64, intel));
  EXPECT_FALSE(runs_along_outputs(rows_of_16_kb, 16, 64, amd));
  EXPECT_TRUE(packs_tokens(rows_of_16_kb, 64));
  EXPECT_TRUE(copies_dy(64, intel));
  EXPECT_FALSE(copies_dy(32, intel)) << "AVX2 packs it";
  EXPECT_FALSE(copies_dy(64, amd));
  EXPECT_TRUE(asks_again(amd));
  EXPECT_FALSE(asks_again(intel));
  EXPECT_TRUE(leaves_large_unasked(64, intel));
  EXPECT_FALSE(leaves_large_unasked(64, amd));
  EXPECT_FALSE(leaves_large_unasked(32, intel)) << "not measured";
}

TEST(Select, VectorsRunAlongOutputsWhereBlocksHoldSome) {
  const auto layout = Layout::from_graph("random(32,0.1)", {.block_size = 32}, 0);
  const auto dense = Layout::from_graph("dense(32)", {.block_size = 32}, 0);
  ASSERT_TRUE(layout.ok() && dense.ok());
  const Product fprop = product_of(*layout, false, 64);
  EXPECT_TRUE(along(fprop, 32));
  EXPECT_FALSE(along(fprop, 64)) << "blocks of one vector";
  EXPECT_FALSE(along(fprop, 0)) << "no such kernel";
  EXPECT_FALSE(along(product_of(*layout, false, 15), 32));
  EXPECT_FALSE(along(product_of(*dense, false, 64), 32)) << "W would be copied for too few tokens";
  EXPECT_TRUE(along(product_of(*dense, true, 64), 32)) << "dgrad reads W where it lies";
  Product other = fprop;
  other.gates = &other;
  EXPECT_FALSE(along(other, 32));
  other = fprop;
  other.y.feature_stride = 64;
  EXPECT_FALSE(along(other, 32));
  other = fprop;
  other.dtype = DType::bf16;
  EXPECT_TRUE(along(other, 32));
  other.x.features = 1023;
  EXPECT_FALSE(along(other, 32)) << "half a pair";
  EXPECT_TRUE(packs_tokens(product_of(*layout, false, 65), 32));
  EXPECT_FALSE(packs_tokens(product_of(*layout, false, 64), 32)) << "b = 32: even";
  const auto sparse = Layout::from_graph("random(64,0.02)", {.block_size = 16}, 0);
  const auto dense_16 = Layout::from_graph("dense(64)", {.block_size = 16}, 0);
  ASSERT_TRUE(sparse.ok() && dense_16.ok());
  EXPECT_FALSE(packs_tokens(product_of(*sparse, false, 512), 32)) << "the copy would be used by too few outputs";
  EXPECT_TRUE(packs_tokens(product_of(*dense_16, false, 64), 32));
  EXPECT_EQ(group_along_outputs(4096), 128);
  EXPECT_EQ(group_along_outputs(16384), 64);
}

TEST(Select, TilesTakeMoreTokensWhereThatPays) {
  const auto group = [](const char* graph, int32_t block, int64_t round) {
    const auto layout = Layout::from_graph(graph, {.block_size = block}, 0);
    return group_of_tiles(product_of(*layout, false, round), round);
  };
  EXPECT_EQ(group("random(16,0.5)", 64, 512), 128);
  EXPECT_EQ(group("random(16,0.5)", 64, 112), 64);
  EXPECT_EQ(group("random(16,0.5)", 32, 512), 128);
  EXPECT_EQ(group("random(16,0.1)", 32, 512), 64) << "short lists";
  EXPECT_EQ(group("random(16,0.5)", 16, 512), 64) << "W is copied in small parts";
}

TEST(Select, GradientsOfLargeBlocksAreSummedAFewTokensAtATime) {
  constexpr int64_t kMost = 1024;
  const auto round_of = [](int32_t block, Order order, DType dw, int64_t vector_bytes) {
    const auto layout = Layout::from_graph("random(8,0.5)", {.block_size = block}, 0);
    const float nothing = 0;  // never read
    const ConstTensor x = activations<const void*>(&nothing, DType::f32, 512, 8 * block, order);
    const GradPair pair{x, x};
    return gradient_round({.dw_dtype = dw, .layout = layout->view(), .pairs = {&pair, 1}}, kMost, vector_bytes);
  };
  EXPECT_EQ(round_of(32, Order::features_last, DType::f32, 32), 64);
  EXPECT_EQ(round_of(16, Order::features_last, DType::f32, 32), kMost);
  EXPECT_EQ(round_of(32, Order::features_first, DType::f32, 32), kMost);
  EXPECT_EQ(round_of(32, Order::features_last, DType::bf16, 32), kMost) << "sums would be narrowed each time";
  EXPECT_EQ(round_of(32, Order::features_last, DType::f32, 64), kMost);
}

TEST(Select, NarrowGradientsOfSeveralRoundsAreSummedWide) {
  Problem p{.pass = Pass::wgrad, .dtype = DType::bf16, .block = 32, .n = 100, .inputs = 256, .outputs = 256};
  EXPECT_EQ(plan_gradient(p, DType::bf16, 10).sums_bytes, 0u);
  p.n = 5000;
  EXPECT_EQ(plan_gradient(p, DType::bf16, 10).sums_bytes, 10u * 32 * 32 * 4);
  EXPECT_EQ(plan_gradient(p, DType::f32, 10).sums_bytes, 0u);
}

}  // namespace
}  // namespace blocksparse::gemm
